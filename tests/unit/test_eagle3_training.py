"""Training a draft head: the unrolled loss against the slow head, and a run that is resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from jobs.eagle3 import train as training_job
from jobs.eagle3.train import Plan, train
from tests.support.eagle_heads import random_head, slow_log_p
from tests.support.tiny_models import VOCAB, byte_tokenizer, tiny_model
from valuspec.eagle3.loading import load_head
from valuspec.eagle3.training import Batch, Labelled, acceptance, unroll


def labelled(seed: int, length: int, answer: int) -> Labelled:
    """A made-up answer; the target's choices are its tokens, with a rival each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 24, (length,), generator=generator)
    said = torch.cat([tokens[length - answer :], tokens[:1]])
    rival = (said + 1) % 24
    p = torch.tensor([0.7, 0.3]).expand(answer + 1, 2)
    return Labelled(
        torch.randn(length, 96, generator=generator), tokens, torch.stack([said, rival], 1), p
    )


def test_unrolling_is_running_the_head_along_the_answer() -> None:
    head = random_head(1, vocab_size=24)
    with torch.no_grad():
        head.d2t.zero_()
    answers = [labelled(0, 9, 5), labelled(1, 6, 4)]
    batch = Batch.of(answers, torch.arange(24))
    unrolled = unroll(head, batch, 3, decay=0.5)
    losses: list[list[float]] = [[], [], []]
    ranks = []
    for answer in answers:
        tokens = answer.tokens.tolist()
        for anchor in range(len(tokens) - len(answer.top_ids), len(tokens) - 2):
            row = []
            for step in range(3):
                label = anchor + 1 + step
                if label >= len(tokens) - 1:
                    row.append(-1)
                    continue
                known = tokens[1 : anchor + 2]
                path = tokens[anchor + 2 : anchor + 2 + step]
                log_p = slow_log_p(head, answer.features, known, path)
                said = tokens[label + 1]
                losses[step].append(-float(0.7 * log_p[said] + 0.3 * log_p[(said + 1) % 24]))
                row.append(int((log_p > log_p[said]).sum()))
            ranks.append(row)
    expected = sum(0.5**i * np.mean(step) for i, step in enumerate(losses))
    assert float(unrolled.loss.detach()) == pytest.approx(float(expected), rel=1e-4)
    assert unrolled.ranks.tolist() == ranks


def test_choices_outside_the_draft_vocabulary_count_as_missed_and_teach_nothing() -> None:
    head = random_head(2, vocab_size=24, draft_vocab_size=12)
    t2d = torch.where(torch.arange(24) < 12, torch.arange(24), -1)
    batch = Batch.of([labelled(3, 20, 12)], t2d)
    unrolled = unroll(head, batch, 1)
    outside = batch.tokens[batch.anchors + 2] >= 12
    assert outside.any()
    assert torch.all((unrolled.ranks[:, 0] == 12) == outside)
    assert torch.isfinite(unrolled.loss)


def test_acceptance_counts_positions_whose_predecessors_were_accepted() -> None:
    ranks = torch.tensor([[0, 0], [0, 1], [2, 0], [0, -1]])
    assert acceptance(ranks, 1) == [0.75, 0.5]
    assert acceptance(ranks, 3) == [1.0, 1.0]


@pytest.fixture
def folders(tmp_path):
    """A tiny target and prompts."""
    model = tiny_model("llama", num_hidden_layers=8)
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    rng = np.random.default_rng(0)
    lines = [json.dumps({"prompt_ids": rng.integers(0, 256, 8).tolist()}) for _ in range(14)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_a_run_that_was_stopped_goes_on_to_the_same_head(folders, monkeypatch) -> None:
    plan = Plan(epochs=3, batch_answers=3, num_steps=2, draft_vocab_size=64, max_tokens=16)
    prompts = [folders / "prompts.jsonl"]
    monkeypatch.setattr(training_job, "SAVE_EVERY", 2)

    def trained(out):
        return train(str(folders / "target"), prompts, folders / out, plan)

    whole = trained("whole")
    steps = training_job.Trainer._train_on
    calls = []

    def stopping(self, batch):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return steps(self, batch)

    monkeypatch.setattr(training_job.Trainer, "_train_on", stopping)
    with pytest.raises(KeyboardInterrupt):
        trained("stopped")
    resumed = trained("stopped")
    assert len(calls) == 6 + whole["steps"] - 4  # from the checkpoint at step 4
    assert resumed["acceptance"] == whole["acceptance"]
    assert whole["held_out_answers"] == 1
    embedding = torch.zeros(VOCAB, 64)
    one, other = (
        load_head(folders / out, embedding=embedding, num_target_layers=8)
        for out in ("whole", "stopped")
    )
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_training_lowers_the_loss(folders) -> None:
    answers = [labelled(seed, 30, 20) for seed in range(6)]
    head = random_head(3, vocab_size=24)
    with torch.no_grad():
        head.d2t.zero_()
    plan = Plan(epochs=40, batch_answers=3, num_steps=2, learning_rate=5e-3)
    trainer = training_job.Trainer(head, 24, answers, folders, plan)
    before = trainer.evaluate(answers).clamp(min=0).float().mean()
    trainer.run()
    assert trainer.evaluate(answers).clamp(min=0).float().mean() < 0.7 * before
