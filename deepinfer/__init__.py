"""DeepInfer: a compiler-driven inference engine for DeepSeek-V4.1-Flash."""
