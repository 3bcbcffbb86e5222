"""Packed rows: several samples end to end in a row, and a model that never looks from one into another.

R: rows, L: tokens in a row, U: tokens in a row of the decoder, N: samples, H: hidden size. Each token's sample is in
``segment_ids`` (R, L): 0, 1, 2, … within the row, and -1 for padding on the right.

All of it is done in hooks of the model's own modules and, where no mask of whole rows is made, by an attention function
that the model's config then names (``segments.attend``). So it works inside whatever wraps the model: DDP, FSDP and
``torch.compile`` call the module inside them, with its hooks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from drawbar.errors import UserError
from drawbar.models.heads import COUNTS_FROM_PAD, Head, without_adapter
from drawbar.models.segments import SEGMENTED, Segments, flash_takes, segments_of

Arguments = dict[str, Any]

DECODERS = {"gemma", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "llama", "mistral", "mixtral"}
DECODERS |= {"olmo2", "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"}
"""Where attention is not computed by segment (``attends_by_segment``), transformers keeps samples apart where
position_ids restart (with flash attention only in a batch of one row; more rows are refused)."""
WITHOUT_SDPA = {"gptj"}
ENCODERS = {"bert", "distilbert", "electra"} | COUNTS_FROM_PAD
"""They take positions and a mask of four dims, and classify a text by its first token."""
ENCODER_DECODERS = {"t5", "mt5", "bart", "mbart"}
PACKED_FAMILIES = DECODERS | ENCODERS | ENCODER_DECODERS
"""Only families whose packed rows the tests compare with padded ones. Others may compute wrongly in
silence, as OPT, Falcon and BLOOM do."""


ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""What these families call the dropout of their attention."""


def allow_packing(model: nn.Module, per_sample: bool, with_row_mask: bool = False) -> None:
    """Let a transformers model take packed rows.

    Called with ``segment_ids`` (and ``decoder_segment_ids``, and explicit ``decoder_input_ids``) in its keyword
    arguments, the model attends only within samples, and counts positions within each; ``position_ids`` and
    ``attention_mask`` are replaced; the caller computes the loss. Called without ``segment_ids`` it works as before, on
    padded batches.

    Call it on the outermost module of the model itself: after adapters (PEFT goes around hooks of what it wraps), and
    before DDP or FSDP.

    Args:
        per_sample: for sequence classification: the logits have shape (N, classes), a row for each sample, in the order
            of rows and of samples in them. If false, the logits are those of each token.
        with_row_mask: attend to a whole row under a mask, as ``eager`` and ``flex_attention`` always do, instead of to
            each sample by itself.

    Raises:
        UserError: this family, this head or this attention cannot be packed.
    """
    inner = without_adapter(model)
    family = getattr(getattr(inner, "config", None), "model_type", None)
    _check(inner, family, per_sample)
    if family in DECODERS:
        packing: _Packing = _Decoder(inner, with_row_mask, per_sample)
    elif family in ENCODERS:
        packing = _Encoder(inner, with_row_mask, per_sample)
    else:
        packing = _EncoderDecoder(inner, with_row_mask)
    model.register_forward_pre_hook(packing.enter, with_kwargs=True)
    model.register_forward_hook(packing.leave, with_kwargs=True, always_call=True)


def packs_without_mask(config: PreTrainedConfig, head: Head) -> bool:
    """Whether a model of this family, with this head, keeps a row's samples apart without a mask for the row."""
    family = config.model_type
    if family in ENCODERS:
        return not getattr(config, "is_decoder", False)
    return family in DECODERS - WITHOUT_SDPA or (family in ENCODER_DECODERS and head == "seq2seq")


def attends_by_flash(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether such a model, which ``packs_without_mask``, trains with torch's flash attention for samples of any
    lengths. What ``segments.attend`` decides from tensors, this says before there is a model.

    Args:
        dtype: that of the run's precision.
    """
    drops = any(getattr(config, name, 0.0) for name in ATTENTION_DROPOUTS)
    has_bias = hasattr(config, "relative_attention_num_buckets")  # T5's
    caps = getattr(config, "attn_logit_softcapping", None) is not None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return not (drops or has_bias or caps) and flash_takes(dtype, size, device)


def _check(model: nn.Module, family: str | None, per_sample: bool) -> None:
    def fault(what: str) -> UserError:
        return UserError(
            what, where="data.batching", remedy="set data.batching=grouped: rows of one sample, of similar length"
        )

    if family not in PACKED_FAMILIES:
        families = ", ".join(sorted(PACKED_FAMILIES))
        raise fault(f"a {family or type(model).__name__} model cannot take packed rows; these families can: {families}")
    if family in ENCODERS and getattr(model.config, "is_decoder", False):
        raise fault(f"a {family} model as a decoder cannot take packed rows")
    if family in ENCODER_DECODERS and not _has_decoder(model):
        # BART's classifier derives the decoder's input from the whole row, and wants as many end tokens in each row
        raise fault(f"{type(model).__name__} cannot take packed rows: of its family, only seq2seq models can")
    attention = model.config._attn_implementation
    if family not in DECODERS and attention not in ("sdpa", "eager"):
        raise fault(f"a {family} model with {attention} attention cannot take packed rows; with sdpa it can")
    if per_sample and family in DECODERS and model.config.pad_token_id is None:
        raise fault(f"this {family} classifier has no pad_token_id, by which it finds a sample's last token")


def _has_decoder(model: nn.Module) -> bool:
    return type(model).__name__.endswith("ForConditionalGeneration")  # what these families call it


def count_positions(segments_RL: Tensor) -> Tensor:
    """Each token's position in its sample, from 0; shape (R, L). Padding is counted as if it were a sample."""
    columns_L = torch.arange(segments_RL.shape[1], device=segments_RL.device)
    begins_RL = _begins(segments_RL)
    return columns_L - torch.where(begins_RL, columns_L, 0).cummax(dim=1).values


def _begins(segments_RL: Tensor) -> Tensor:
    """Where a sample, or the padding, begins; shape (R, L), bool."""
    return functional.pad(segments_RL[:, 1:] != segments_RL[:, :-1], (1, 0), value=True)


def _last_tokens(segments_RL: Tensor, firsts_N: Tensor, is_pad_RL: Tensor) -> Tensor:
    """Index (of R·L) of each sample's last token that is not a pad token, or of its first if all are; shape (N,). The
    rows' paddings, which ``Segments`` counts as samples, are not among them."""
    tokens = torch.arange(segments_RL.numel(), device=segments_RL.device)
    samples = torch.searchsorted(firsts_N, tokens, right=True) - 1
    is_end = ((segments_RL >= 0) & ~is_pad_RL).flatten()
    return firsts_N.scatter_reduce(0, samples, torch.where(is_end, tokens, 0), "amax")


def _keyword_arguments(segments: Segments, segments_RL: Tensor) -> Arguments:
    """What ``segments.attend`` needs to keep to samples. ``attention_mask`` is a placeholder of four dims: transformers
    passes on a mask of four dims unchanged; for None it would make one, and wait for the device to do so."""
    return {"attention_mask": segments_RL[:, None, None], "segments": segments}


def _mask(model: nn.Module, allowed_RUL: Tensor) -> Tensor:
    """What the model's attention takes: shape (R, 1, U, L); bool, or numbers to be added to the scores."""
    allowed = allowed_RUL[:, None]
    if model.config._attn_implementation == "sdpa":
        return allowed
    dtype = model.get_input_embeddings().weight.dtype
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def _same_segment(queries_RU: Tensor, keys_RL: Tensor) -> Tensor:
    """Which keys a query may look at; shape (R, U, L), bool.

    Padding looks at padding, which no sample looks at: the result of a query without any key would be NaN.
    """
    return queries_RU[:, :, None] == keys_RL[:, None, :]


class _Packing:
    """State of the hooks during a forward; ``segments_RL`` is None if rows are not packed."""

    segments_RL: Tensor | None = None
    segments: tuple[Segments, ...] = ()

    def __init__(self, model: nn.Module, with_row_mask: bool) -> None:
        self.model = model
        self.attends_by_segment = not with_row_mask and model.config._attn_implementation == "sdpa"
        if self.attends_by_segment:
            for module in model.modules():
                if hasattr(module, "config"):
                    module.config._attn_implementation = SEGMENTED

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
        """Forward pre-hook of the model."""
        kwargs = dict(kwargs)
        self.segments_RL = kwargs.pop("segment_ids", None)
        decoder_segments_RU = kwargs.pop("decoder_segment_ids", None)
        if self.segments_RL is not None:
            sides = (self.segments_RL, decoder_segments_RU)
            self.segments = segments_of(*(side for side in sides if side is not None))
            kwargs.pop("position_ids", None)
            kwargs |= self.arguments(self.segments_RL, decoder_segments_RU, kwargs)
        return args, kwargs

    def arguments(self, segments_RL: Tensor, decoder_segments_RU: Tensor | None, kwargs: Arguments) -> Arguments:
        """The arguments that the model gets in place of the segment ids."""
        raise NotImplementedError

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, outputs: Any) -> Any:
        """Forward hook of the model, called even where the forward fails."""
        self.segments_RL, self.segments = None, ()
        return outputs


class _Decoder(_Packing):
    handle: RemovableHandle | None = None
    """Of the hook that chooses a sample's logits, during a forward."""

    def __init__(self, model: nn.Module, with_row_mask: bool, per_sample: bool) -> None:
        super().__init__(model, with_row_mask)
        self.per_sample = per_sample
        self.tokens_RL: Tensor | None = None
        self.logits_NC: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
        found = super().enter(module, args, kwargs)
        if self.per_sample and self.segments_RL is not None:
            # the last hook, behind DeepSpeed's: what goes by that does not get its weight back for backward
            score: Any = without_adapter(module).score
            self.handle = score.register_forward_hook(self.choose)
        return found

    def arguments(self, segments_RL: Tensor, decoder_segments_RU: Tensor | None, kwargs: Arguments) -> Arguments:
        self.tokens_RL = kwargs["input_ids"]
        attention = self.model.config._attn_implementation
        if "flash" in attention and len(segments_RL) > 1:  # transformers would attend to whole rows, in silence
            raise UserError(
                f"{attention} keeps samples apart in a micro-batch of one packed row alone, and this one has "
                f"{len(segments_RL)}",
                where="task.attention, train.micro_batch",
                remedy="set task.attention=sdpa, which takes torch's flash attention for samples; or "
                "train.micro_batch=1",
            )
        # transformers detects samples by restarting positions, but only without attention mask and cache
        within = (
            {"attention_mask": None}
            if not self.attends_by_segment
            else _keyword_arguments(self.segments[0], segments_RL)
        )
        return {"position_ids": count_positions(segments_RL), "use_cache": False, **within}

    def choose(self, module: nn.Module, args: tuple[Any, ...], logits_RLC: Tensor) -> None:
        """The model scores every token, and then keeps one a row; this keeps one a sample, by the same rule."""
        if self.segments_RL is not None and self.tokens_RL is not None:
            last_N = _last_tokens(
                self.segments_RL, self.segments[0].firsts, self.tokens_RL == self.model.config.pad_token_id
            )
            self.logits_NC = logits_RLC.flatten(0, 1)[last_N]

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, outputs: Any) -> Any:
        if self.handle is not None:
            self.handle.remove()
        if self.logits_NC is not None and outputs is not None:
            outputs.logits = self.logits_NC
        self.tokens_RL = self.logits_NC = self.handle = None
        return super().leave(module, args, kwargs, outputs)


class _Encoder(_Packing):
    def __init__(self, model: nn.Module, with_row_mask: bool, per_sample: bool) -> None:
        super().__init__(model, with_row_mask)
        if per_sample:
            model.base_model.register_forward_hook(self.keep_first_states)
            if getattr(model.base_model, "pooler", None) is not None:
                model.base_model.pooler.register_forward_pre_hook(self.keep_first)

    def arguments(self, segments_RL: Tensor, decoder_segments_RU: Tensor | None, kwargs: Arguments) -> Arguments:
        config = self.model.config
        positions_RL = count_positions(segments_RL)
        if config.model_type in COUNTS_FROM_PAD:
            positions_RL = self.count_from_pad(segments_RL, kwargs["input_ids"])
        if self.attends_by_segment:
            return {"position_ids": positions_RL, **_keyword_arguments(self.segments[0], segments_RL)}
        return {
            "position_ids": positions_RL,
            "attention_mask": _mask(self.model, _same_segment(segments_RL, segments_RL)),
        }

    def count_from_pad(self, segments_RL: Tensor, tokens_RL: Tensor) -> Tensor:
        """``RobertaEmbeddings.create_position_ids_from_input_ids``, within each sample."""
        pad = self.model.config.pad_token_id
        counted_RL = (tokens_RL != pad).long()
        total_RL = counted_RL.cumsum(dim=1)
        before_RL = torch.where(_begins(segments_RL), total_RL - counted_RL, 0).cummax(dim=1).values
        return (total_RL - before_RL) * counted_RL + pad

    def keep_first(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """These families classify by a row's first token: give them a row for each sample, of only that token."""
        if self.segments_RL is None:
            return args
        return (self.first_states(args[0]), *args[1:])

    def keep_first_states(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        if self.segments_RL is not None:
            outputs.last_hidden_state = self.first_states(outputs.last_hidden_state)
        return outputs

    def first_states(self, states_RLH: Tensor) -> Tensor:
        return states_RLH.flatten(0, 1).index_select(0, self.segments[0].firsts)[:, None]  # (N, 1, H)


class _EncoderDecoder(_Packing):
    def __init__(self, model: nn.Module, with_row_mask: bool) -> None:
        super().__init__(model, with_row_mask)
        self.decoder_segments_RU: Tensor | None = None
        for module in model.modules():
            if hasattr(module, "has_relative_attention_bias") and self.attends_by_segment:
                module.register_forward_pre_hook(_add_bias_of_a_sample, with_kwargs=True)
        encoder, decoder = model.get_encoder(), model.get_decoder()
        encoder.register_forward_pre_hook(self.mask_encoder, with_kwargs=True)
        decoder.register_forward_pre_hook(self.mask_decoder, with_kwargs=True)
        # T5 has no position embedding: its bias depends on the distance of two tokens, which packing does not change
        if hasattr(encoder, "embed_positions"):
            _count_within_samples(encoder.embed_positions, lambda: self.segments_RL)
            _count_within_samples(decoder.embed_positions, lambda: self.decoder_segments_RU)

    def arguments(self, segments_RL: Tensor, decoder_segments_RU: Tensor | None, kwargs: Arguments) -> Arguments:
        if decoder_segments_RU is None or "decoder_input_ids" not in kwargs:
            raise ValueError("packed rows of an encoder–decoder need decoder_segment_ids and decoder_input_ids")
        self.decoder_segments_RU = decoder_segments_RU
        # encoder and decoder would get the same attention_mask, but differ in shape: it is set in their own hooks
        return {"attention_mask": None, "decoder_attention_mask": None, "use_cache": False}

    def mask_encoder(self, module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        if self.segments_RL is None:
            return args, kwargs
        if self.attends_by_segment:
            return args, {**kwargs, **_keyword_arguments(self.segments[0], self.segments_RL)}
        mask = _mask(self.model, _same_segment(self.segments_RL, self.segments_RL))
        return args, {**kwargs, "attention_mask": mask}

    def mask_decoder(self, module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        if self.segments_RL is None or self.decoder_segments_RU is None:
            return args, kwargs
        if self.attends_by_segment:
            source, target = self.segments
            attention = {**_keyword_arguments(target, self.decoder_segments_RU), "source_segments": source}
            return args, {**kwargs, **attention, "encoder_attention_mask": attention["attention_mask"]}
        causal_RUU = _same_segment(self.decoder_segments_RU, self.decoder_segments_RU).tril()
        allowed_RUL = _same_segment(self.decoder_segments_RU, self.segments_RL)
        # A decoder's padding may have no padding of the encoder to look at, and a query without any key is NaN in some
        # attention kernels. So padding attends to everything; its outputs are not used.
        allowed_RUL = allowed_RUL | (self.decoder_segments_RU < 0)[:, :, None]
        masks = {
            "attention_mask": _mask(self.model, causal_RUU),
            "encoder_attention_mask": _mask(self.model, allowed_RUL),
        }
        return args, {**kwargs, **masks}

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Arguments, outputs: Any) -> Any:
        self.decoder_segments_RU = None
        return super().leave(module, args, kwargs, outputs)


def _add_bias_of_a_sample(attention: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
    """Forward pre-hook of T5's attention: its bias depends on how far apart two tokens are, so the bias of the longest
    sample serves all of them; T5 itself would make one for a whole row. The first layer hands it on to the others."""
    segments = kwargs.get("segments")
    if segments is None or kwargs.get("position_bias") is not None:
        return args, kwargs
    if attention.has_relative_attention_bias:
        bias = attention.compute_bias(segments.longest, segments.longest, device=segments.starts.device)
    else:
        bias = torch.zeros((1, 1, 1, 1), device=segments.starts.device)  # of cross-attention, which has none
    return args, {**kwargs, "position_bias": bias}


def _count_within_samples(embeddings: nn.Module, segments: Callable[[], Tensor | None]) -> None:
    """Let BART's position embedding take positions within samples: it counts along the row, maybe past its table."""

    def give(module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        segments_RL = segments()
        return (args, kwargs) if segments_RL is None else (args[:1], {"position_ids": count_positions(segments_RL)})

    def take(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output if segments() is None else output[0]  # BART adds a first dimension if positions are given

    embeddings.register_forward_pre_hook(give, with_kwargs=True)
    embeddings.register_forward_hook(take)
