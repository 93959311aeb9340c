"""Small models with vocabularies that do not divide, and losses in all the ways in which they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, VOCABULARY = 8, 6, 97

Batch = dict[str, Tensor]


def batch(seed: int = 0) -> Batch:
    """Most rows have few labels, two have none, and one has nine tenths of all that there are; ids at the borders of every part."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    ids[0] = torch.tensor([0, 48, 49, 24, 25, 96])
    labels[0] = torch.tensor([96, 0, 48, 49, 32, 33])
    kept = torch.arange(LENGTH)[None] < torch.tensor([6, 0, 1, 0, 2, 6, 1, 1])[:, None]
    return {"input_ids": ids, "labels": labels.where(kept, -100)}


class Words(nn.Module):
    """A table, an MLP that keeps the hidden size, and a head; the loss is computed by `loss`."""

    def __init__(
        self, loss: Callable[[Words, Tensor, Tensor], Tensor], *, tied: bool = True, bias: bool = False, padding: int | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12, padding_idx=padding)
        self.up, self.down, self.norm = nn.Linear(12, 14), nn.Linear(14, 12), nn.LayerNorm(12)
        self.head = nn.Linear(12, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("weights", torch.rand(VOCABULARY) + 0.5)
        self.loss = loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return self.loss(self, self.head(x), labels)


def flat(reduction: str = "mean", **settings: Any) -> Callable[[Words, Tensor, Tensor], Tensor]:
    def loss(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction=reduction, **settings)

    return loss


def weighed(reduction: str = "mean", **settings: Any) -> Callable[[Words, Tensor, Tensor], Tensor]:
    def loss(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), weight=model.weights, reduction=reduction, **settings)  # type: ignore[arg-type]

    return loss


def over_places(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """Classes come second, positions last."""
    return F.cross_entropy(scores.transpose(1, 2), labels, weight=model.weights, label_smoothing=0.2)  # type: ignore[arg-type]


def shifted(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def capped(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(5 * torch.tanh(scores / 5).view(-1, VOCABULARY), labels.view(-1))


def own_mean(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    return each.sum() / (labels != -100).sum()


def far_out(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """Scores so large that exp of them is infinite, and one class that cannot be."""
    hidden = torch.zeros(VOCABULARY, dtype=scores.dtype)
    hidden[17] = -torch.inf
    return F.cross_entropy((scores * 100 + 2000 + hidden).flatten(0, 1), labels.masked_fill(labels == 17, 18).flatten())


LOSSES: Mapping[str, Callable[[], Words]] = {
    "mean": lambda: Words(flat()),
    "sum": lambda: Words(flat("sum")),
    "its own mean": lambda: Words(own_mean),
    "untied, with a bias": lambda: Words(flat(), tied=False, bias=True),
    "tied, with a bias": lambda: Words(flat(), bias=True),
    "with a padding row": lambda: Words(flat(), padding=0),
    "with a padding row in the middle": lambda: Words(flat(), padding=48),
    "another ignored label": lambda: Words(flat(ignore_index=32)),
    "smoothed": lambda: Words(flat(label_smoothing=0.1)),
    "smoothed sum": lambda: Words(flat("sum", label_smoothing=0.1)),
    "weighed": lambda: Words(weighed()),
    "weighed and smoothed": lambda: Words(weighed(label_smoothing=0.3)),
    "over places": lambda: Words(over_places),
    "shifted": lambda: Words(shifted),
    "capped": lambda: Words(capped),
    "far out": lambda: Words(far_out),
}


def words(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(3)
    rows = batch()
    if "another" in name:
        rows["labels"] = rows["labels"].masked_fill(rows["labels"] == -100, 32)
    return {**LOSSES, **HANDWRITTEN}[name]().double().train(), rows


def next_token(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss in the scores' own type."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["targets"][:, 1:].flatten())


def llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, tie_word_embeddings=tied, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )


def bert() -> nn.Module:
    """A transformation and a norm stand between the encoder and the head, which has a bias."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))


def t5() -> nn.Module:
    """One table for the encoder, the decoder and the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_ff": 22, "d_kv": 4, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **sizes))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama tied": lambda: llama(tied=True),
    "llama untied": lambda: llama(tied=False),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
}


def transformer(name: str) -> tuple[nn.Module, Batch, Callable[..., Tensor] | None]:
    """A model, its batch, and a loss for those whose own casts to float32."""
    torch.manual_seed(5)
    model, rows = MODELS[name]().double().train(), batch()
    if name == "t5":
        rows["decoder_input_ids"] = rows["input_ids"].roll(1, 1)
    if name in ("llama tied", "llama untied", "gpt2"):
        return model, {"input_ids": rows["input_ids"], "targets": rows["labels"]}, next_token
    return model, rows, None


# --- losses written by hand ------------------------------------------------------------------------------------------


Loss = Callable[[Words, Tensor, Tensor], Tensor]


def kept_mean(each: Tensor, labels: Tensor) -> Tensor:
    """The mean over the tokens that have a label."""
    kept = labels != -100
    return each.masked_fill(~kept, 0.0).sum() / kept.sum()


def z_loss(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    return loss + 1e-2 * kept_mean(scores.logsumexp(-1).square(), labels)


def nll(reduction: str, **settings: Any) -> Loss:
    def loss(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(scores, -1).flatten(0, 1), labels.flatten(), reduction=reduction, **settings)

    return loss


def nll_weighed(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(scores, -1).transpose(1, 2), labels, weight=model.weights)  # type: ignore[arg-type]


def gathered_logs(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    picked = scores.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -kept_mean(picked, labels)


def gathered_scores(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """Shifted by one, as language models are."""
    scores, labels = scores[:, :-1], labels[:, 1:]
    picked = torch.gather(scores, 2, labels.clamp(min=0)[..., None])[..., 0]
    return kept_mean(scores.logsumexp(-1) - picked, labels)


def indexed_logs(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    logs, wanted = scores.flatten(0, 1).log_softmax(1), labels.flatten()
    return -kept_mean(logs[torch.arange(wanted.shape[0]), wanted.clamp(min=0)], wanted)


def one_hot(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    wanted = F.one_hot(labels.clamp(min=0), VOCABULARY).to(scores.dtype)
    return kept_mean(-(wanted * F.log_softmax(scores, dim=-1)).sum(-1), labels)


def compared(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """A one-hot vector by comparison with all words."""
    wanted = labels.unsqueeze(-1) == torch.arange(VOCABULARY)
    return kept_mean(-torch.where(wanted, scores.log_softmax(-1), 0.0).sum(-1), labels)


def log_of_softmax(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    odds = torch.softmax(scores, -1)
    return -kept_mean(odds.log().gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1), labels)


def smoothed_by_hand(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    logs = scores.log_softmax(-1)
    sharp = -logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return kept_mean(0.9 * sharp - 0.1 * logs.mean(-1), labels)


def smoothed_by_sum(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """As transformers' label smoother has it."""
    logs, ignored = -F.log_softmax(scores, dim=-1), labels.eq(-100).unsqueeze(-1)
    sharp = logs.gather(dim=-1, index=labels.clamp(min=0).unsqueeze(-1)).masked_fill(ignored, 0.0)
    smooth = logs.sum(dim=-1, keepdim=True).masked_fill(ignored, 0.0)
    count = (~ignored).sum()
    return 0.9 * sharp.sum() / count + 0.1 * smooth.sum() / (count * VOCABULARY)


def steady(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """logsumexp by hand, the gradient of the largest score included."""
    top = scores.max(-1, keepdim=True).values
    logs = scores - top - (scores - top).exp().sum(-1, keepdim=True).log()
    return -kept_mean(logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0], labels)


def steady_amax(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    top = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - top)
    odds = powers / powers.sum(-1, keepdim=True)
    return -kept_mean(odds.gather(-1, labels.clamp(min=0)[..., None])[..., 0].log(), labels) + 0.1 * kept_mean(top[..., 0].square(), labels)


def entropy(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    logs = scores.log_softmax(-1)
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    return loss - 0.1 * kept_mean(-(logs.exp() * logs).sum(-1), labels)


def entropy_of_softmax(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    return kept_mean((scores.softmax(-1) * scores.log_softmax(-1)).sum(-1), labels)


def divergence(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """From a teacher's probabilities, which every rank has."""
    teacher = (model.weights * (1 + labels.clamp(min=0)).unsqueeze(-1)).to(scores.dtype).sin().softmax(-1)  # type: ignore[operator]
    return F.kl_div(F.log_softmax(scores / 2, -1), teacher, reduction="sum") / (labels != -100).sum()


def divergence_of_each(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    teacher = (model.weights * (1 + labels.clamp(min=0)).unsqueeze(-1)).to(scores.dtype).sin().log_softmax(-1)  # type: ignore[operator]
    each = F.kl_div(F.log_softmax(scores, -1), teacher, reduction="none", log_target=True).sum(-1)
    return kept_mean(each, labels)


def squared(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """Distance from a teacher's scores, beside the likelihood of the labels."""
    teacher = (model.weights * (1 + labels.clamp(min=0)).unsqueeze(-1)).to(scores.dtype).cos()  # type: ignore[operator]
    return F.mse_loss(scores, teacher) + nll("mean")(model, scores, labels)


def probable(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """Probabilities for labels, two words for each token."""
    first = F.one_hot(labels.clamp(min=0), VOCABULARY).to(scores.dtype)
    mixed = 0.7 * first + 0.3 * first.roll(1, 1)
    return F.cross_entropy(scores.flatten(0, 1), mixed.flatten(0, 1), label_smoothing=0.1)


def unlikely(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, and the likelihood of what was not said pushed down."""
    odds = scores.softmax(-1)
    wrong = odds.gather(-1, labels.roll(1, 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten()) - kept_mean(torch.log1p(-wrong), labels)


HANDWRITTEN: Mapping[str, Callable[[], Words]] = {
    "z-loss": lambda: Words(z_loss),
    "nll": lambda: Words(nll("mean")),
    "nll, sum": lambda: Words(nll("sum"), tied=False, bias=True),
    "nll, weighed": lambda: Words(nll_weighed),
    "gathered logs": lambda: Words(gathered_logs),
    "gathered scores": lambda: Words(gathered_scores, tied=False),
    "indexed logs": lambda: Words(indexed_logs),
    "one-hot": lambda: Words(one_hot),
    "compared": lambda: Words(compared),
    "log of softmax": lambda: Words(log_of_softmax),
    "smoothed by hand": lambda: Words(smoothed_by_hand),
    "smoothed by sum": lambda: Words(smoothed_by_sum, bias=True),
    "steady": lambda: Words(steady),
    "steady amax": lambda: Words(steady_amax),
    "entropy": lambda: Words(entropy),
    "entropy of softmax": lambda: Words(entropy_of_softmax),
    "divergence": lambda: Words(divergence),
    "divergence of each": lambda: Words(divergence_of_each),
    "squared": lambda: Words(squared),
    "probable": lambda: Words(probable),
    "unlikely": lambda: Words(unlikely),
}
