"""The requests of a check: fixed by the seed, of all kinds, within the model's limits."""

from __future__ import annotations

from typing import Any

from deepinfer.testing.invariance.jobs import cut_prompt, draw_ids, make_jobs, prompt_lengths

FACTS: dict[str, Any] = {"vocab_size": 512, "bos": 0, "eos": [1], "noise_token": 511,
                         "page_size": 16, "window": 8, "max_model_len": 80}


def test_a_seed_fixes_everything() -> None:
    jobs = make_jobs(FACTS, count=8, seed=3, grammar=False)
    assert jobs == make_jobs(FACTS, count=8, seed=3, grammar=False)
    assert jobs[:3] == make_jobs(FACTS, count=3, seed=3, grammar=False)
    assert jobs != make_jobs(FACTS, count=8, seed=4, grammar=False)
    assert len({j.params.seed for j in jobs}) == len({j.prompt for j in jobs}) == 8


def test_lengths_meet_page_ends_and_the_window_and_fit() -> None:
    assert prompt_lengths(FACTS) == [19, 28, 5, 17, 41, 1]
    jobs = make_jobs(FACTS, count=40, seed=0, grammar=False)
    assert [len(j.prompt) for j in jobs[:7]] == [19, 28, 5, 17, 41, 1, 20]
    assert all(len(j.prompt) + j.params.max_tokens < 80 for j in jobs)
    short = make_jobs({**FACTS, "max_model_len": 24}, count=6, seed=0, grammar=False)
    assert max(len(j.prompt) for j in short) == 11


def test_every_kind_of_parameter_is_there() -> None:
    jobs = make_jobs(FACTS, count=6, seed=0, grammar=True)
    params = [j.params for j in jobs]
    assert {p.temperature > 0 for p in params} == {True, False}
    assert any(p.repetition_penalty != 1 and p.presence_penalty for p in params)
    assert any(p.logit_bias and p.min_p and p.top_k for p in params)
    assert any(p.stop_token_ids and p.min_tokens for p in params)
    assert any(p.structured for p in params)
    plain = make_jobs(FACTS, count=6, seed=0, grammar=False)
    assert any(j.params.allowed_token_ids for j in plain)
    assert not any(j.params.structured for j in plain)


def test_special_tokens_are_not_drawn() -> None:
    assert not set(draw_ids(FACTS, 5000, 1)) & {0, 1, 511}


def test_prompts_from_texts() -> None:
    jobs = make_jobs(FACTS, count=3, seed=0, grammar=False, texts=[range(3, 90), range(100, 110)])
    assert jobs[0].prompt == tuple(range(3, 22))
    assert jobs[1].prompt == (*range(100, 110), *range(3, 21))
    assert jobs[2].prompt == tuple(range(3, 8))


def test_prompts_cut_from_short_texts_are_as_long_as_others() -> None:
    """Else a condition such as a prompt longer than replay keeps would not occur."""
    texts = [[5, 6], [], [7, 8, 9]]
    assert cut_prompt(texts, 0, 4) == (5, 6, 7, 8)
    assert cut_prompt(texts, 2, 7) == (7, 8, 9, 5, 6, 7, 8)
    assert cut_prompt([[], []], 0, 4) == ()
    jobs = make_jobs(FACTS, count=6, seed=0, grammar=False, texts=texts)
    assert [len(j.prompt) for j in jobs] == prompt_lengths(FACTS)
