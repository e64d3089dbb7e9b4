# Every target does its own set-up, in .venv, once. Needs: Python 3.11 or later, a C++ compiler.
#   make run        compile the bundled model for this CPU, and answer PROMPT
#   make test       linters, types, tests
#   make test-all   the same with the long tests
#   make bench      all benchmarks, an hour and a half on an idle machine; records go to BENCH_OUT
#   make clean      remove .venv and everything built
#   PIP_ARGS='...'  goes to every `pip install`;  PYTHON=... chooses the interpreter

.DELETE_ON_ERROR:
.PHONY: run test test-all bench clean
.DEFAULT_GOAL := run

PROMPT ?= def fibonacci(n):
export PROMPT
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
PIP_ARGS ?=
BENCH_OUT ?= benchmarks.jsonl
BENCH_ARGS ?=

# A stamp stands for "pyproject.toml as it is now, installed for this folder": a changed file
# and a moved clone (scripts hold absolute paths) both set up again.
KEY := $(shell (pwd; cat pyproject.toml) | cksum | cut -d' ' -f1)
TEST_STAMP := .venv/.stamp-$(KEY)-test
RUN_STAMP := $(or $(wildcard $(TEST_STAMP)),.venv/.stamp-$(KEY))

run: $(RUN_STAMP)
	.venv/bin/deepinfer run --prompt "$$PROMPT"

test: $(TEST_STAMP)
	.venv/bin/python -m ruff check .
	.venv/bin/python -m mypy --strict deepinfer autotune
	.venv/bin/python -m pytest -q -n 2 $(PYTEST_ARGS)

test-all: PYTEST_ARGS += --full
test-all: test

# One after the other, and nothing else beside them: all of them time the same cores.
bench: $(TEST_STAMP)
	.venv/bin/python benchmarks/ceilings.py --out $(BENCH_OUT) $(BENCH_ARGS)
	.venv/bin/python benchmarks/kernels.py --out $(BENCH_OUT) $(BENCH_ARGS)
	.venv/bin/python benchmarks/serving.py --out $(BENCH_OUT) $(BENCH_ARGS)
	.venv/bin/python benchmarks/engine.py --out $(BENCH_OUT) $(BENCH_ARGS)
	.venv/bin/python benchmarks/compile.py --out $(BENCH_OUT) $(BENCH_ARGS)
	.venv/bin/python benchmarks/loading.py --out $(BENCH_OUT) $(BENCH_ARGS)
	.venv/bin/python benchmarks/tuning.py --budget 30m --out $(BENCH_OUT) $(BENCH_ARGS)
	.venv/bin/python benchmarks/goals.py $(BENCH_OUT)
	@echo 'compare with an earlier run: .venv/bin/python benchmarks/compare.py OLD.jsonl $(BENCH_OUT)'

clean:
	rm -rf .venv build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp-$(KEY):
	@$(call set_up,.[compile],300 MB)
.venv/.stamp-$(KEY)-test:
	@$(call set_up,.[compile$(comma)dev],350 MB)

comma := ,

# $(call set_up,REQUIREMENT,SIZE): names what is missing before it touches anything, then installs.
# .venv/.unfinished is there while pip works: a set-up that was interrupted starts afresh.
define set_up
set -eu; \
missing() { printf 'make: %s\n  next: %s\n' "$$1" "$$2" >&2; exit 3; }; \
python=; \
for p in $(PYTHON); do \
  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
    then python=$$p; break; fi; \
done; \
[ -n "$$python" ] || missing 'no Python 3.11 or later among: $(PYTHON)' \
  'install Python 3.11 or later (Debian: apt-get install python3), or name one: make PYTHON=/path/to/python3'; \
"$$python" -c 'import venv, ensurepip' 2>/dev/null || missing "$$python has no venv module" \
  'install it (Debian: apt-get install python3-venv)'; \
cxx=; \
for c in $(if $(filter default undefined,$(origin CXX)),,"$(CXX)") g++ c++ clang++; do \
  if echo 'int main() { return 0; }' | $$c -std=c++17 -x c++ - -o /dev/null 2>/dev/null; \
    then cxx=$$c; break; fi; \
done; \
[ -n "$$cxx" ] || missing 'no working C++17 compiler among: CXX, g++, c++, clang++' \
  'install one (Debian: apt-get install g++; macOS: xcode-select --install), or name one: make CXX=/path/to/g++'; \
if [ -e .venv/.unfinished ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
  rm -rf .venv; mkdir .venv; touch .venv/.unfinished; "$$python" -m venv .venv; \
fi; \
touch .venv/.unfinished; \
echo 'Setting up .venv, once: downloads about $(2) where pip finds a CPU build of torch 2.13.0' >&2; \
echo '(190 MB). From plain PyPI, torch for Linux x86-64 is the CUDA build: several GB. To avoid it:' >&2; \
echo "  make PIP_ARGS='--extra-index-url URL-of-an-index-of-CPU-builds'" >&2; \
if [ -t 2 ]; then quiet=; else quiet=-q; fi; \
.venv/bin/python -m pip install --disable-pip-version-check $$quiet $(PIP_ARGS) -e '$(1)' \
  || missing 'pip could not install $(1)' \
  'read the lines above; behind a mirror or offline, say so with PIP_ARGS (see CONTRIBUTING.md)'; \
rm -f .venv/.stamp-* .venv/.unfinished; \
touch $@
endef
