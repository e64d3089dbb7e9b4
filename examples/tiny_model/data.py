"""Training text: sources of the Python standard library, and generated chats."""

import hashlib
import random
import sysconfig
from pathlib import Path

import numpy as np
from chats import KINDS, chat
from config import TRAINED
from tokenizer import BOS, EOS
from tokenizers import Tokenizer

HERE = Path(__file__).parent
MANIFEST = HERE / "corpus.txt"
PACKAGES = ("asyncio collections concurrent ctypes curses dbm distutils email encodings html http "
            "idlelib importlib json logging multiprocessing re sqlite3 tkinter tomllib unittest "
            "urllib wsgiref xml xmlrpc zoneinfo").split()
WINDOW = TRAINED["sliding_window"]
CHAT_SHARE = 0.2  # of the rows of a batch
OPENINGS = ("def", "class", "import", "from", "@")  # tokens that begin a statement at the margin


def library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def list_library() -> list[str]:
    """The corpus files of the running interpreter: no tests, no tables, nothing generated."""
    found = []
    for file in library().rglob("*.py"):
        parts = file.relative_to(library()).parts
        top = parts[0] in PACKAGES or len(parts) == 1
        tests = any("test" in p for p in parts[:-1])
        table = parts[0] == "encodings" and (parts[-1].startswith(("cp", "iso", "mac_", "koi8")))
        generated = parts[-1].startswith("_sysconfigdata")
        if top and not tests and not table and not generated:
            found.append("/".join(parts))
    return sorted(found)


def write_manifest() -> None:
    lines = [f"{hashlib.sha256((library() / f).read_bytes()).hexdigest()} {f}"
             for f in list_library()]
    MANIFEST.write_text("\n".join(lines) + "\n")


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 12 == 0


def held_out(texts: dict[str, str], half: int | None = None) -> list[str]:
    """The texts that no training sees, or every other one: half 0 is for calibrating, 1 for
    measuring what was calibrated."""
    chosen = [text for name, text in texts.items() if is_held_out(name)]
    return chosen if half is None else chosen[half::2]


def read_corpus() -> dict[str, str]:
    """The files of the manifest by name. Says how many differ from the ones it was made of."""
    texts, other = {}, 0
    for line in MANIFEST.read_text().splitlines():
        digest, name = line.split(" ", 1)
        file = library() / name
        data = file.read_bytes() if file.exists() else b""
        other += hashlib.sha256(data).hexdigest() != digest
        if data:
            texts[name] = data.decode(errors="replace")
    if other:
        print(f"corpus: {other} of {len(texts)} files are not those of {MANIFEST.name}; "
              "results will differ a little", flush=True)
    return texts


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def encode_files(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Each text as a document: bos, tokens, eos."""
    encoded = tokenizer.encode_batch([BOS + t + EOS for t in texts], add_special_tokens=False)
    return [np.array(e.ids, np.int32) for e in encoded]


class Batches:
    """Batch `step` is a function of (seed, step, length, copies) alone, so that training can stop
    and resume."""

    def __init__(self, documents: list[np.ndarray], tokenizer: Tokenizer, seed: int) -> None:
        self.stream = np.concatenate(documents)
        self.starts = np.cumsum([0, *map(len, documents)])[:-1]
        self.tokenizer, self.seed = tokenizer, seed
        vocabulary = tokenizer.get_vocab()
        self.bos = vocabulary[BOS]
        lines = [i for token, i in vocabulary.items() if token.endswith("Ċ")]  # a newline, encoded
        words = [vocabulary[w] for w in OPENINGS if w in vocabulary]
        self.openings = 1 + np.flatnonzero(np.isin(self.stream[:-1], lines)
                                           & np.isin(self.stream[1:], words))

    def __call__(self, step: int, rows: int, length: int, copies: float = 0) -> np.ndarray:
        """Tokens [rows, length + 1]; a share `copies` of the rows are snippets said twice."""
        rng = np.random.default_rng((self.seed, step))
        return np.stack([self._row(rng, length + 1, copies) for _ in range(rows)])

    def _row(self, rng: np.random.Generator, length: int, copies: float) -> np.ndarray:
        kind, begin = rng.random(), rng.random()
        if kind < copies:
            return self._copies(rng, length)
        if kind < copies + CHAT_SHARE:
            return self._chats(random.Random(int(rng.integers(2**62))), length)
        last = len(self.stream) - length
        if begin < 0.15 and len(self.openings):  # a prompt may begin with any statement
            start = min(int(rng.choice(self.openings)), last)
            return np.concatenate(([self.bos], self.stream[start:start + length - 1]),
                                  dtype=np.int32)
        start = int(rng.choice(self.starts)) if begin < 0.25 else int(rng.integers(last))
        return self.stream[min(start, last):][:length]

    def _copies(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Snippets, each said twice: they teach to look back and copy.

        So little text holds too few repetitions for that to be learned from it alone. In half of
        the snippets the tokens are shuffled: nothing but copying predicts the second time. Half of
        them are longer than the window: nothing but compressed entries shows the first time.
        """
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < length:
            longest = length // 2
            if longest > WINDOW and rng.random() < 0.5:
                size = int(rng.integers(WINDOW, longest + 1))
            else:
                size = int(2 ** rng.uniform(3, np.log2(longest)))
            start = int(rng.integers(len(self.stream) - size))
            snippet = self.stream[start:start + size]
            parts += [rng.permutation(snippet) if rng.random() < 0.5 else snippet] * 2
        return np.concatenate(parts)[:length]

    def _chats(self, rng: random.Random, length: int) -> np.ndarray:
        """Chats one after another; in half of the rows the first is cut, so that short rows see
        the ends of long chats too."""
        ids: list[int] = []
        cut = rng.random() if rng.random() < 0.5 else 0.0
        while len(ids) < length:
            ids += encode(self.tokenizer, chat(rng.choice(KINDS), rng))
            ids, cut = ids[int(cut * len(ids)):], 0.0
        return np.array(ids[:length], np.int32)
