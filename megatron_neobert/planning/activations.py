"""What autograd keeps of one micro-batch on one rank, by arithmetic: bytes of each tensor saved for the backward pass.

Read off the code that runs, layer by layer: torch's operations on a CPU, the fused ones on a GPU, or Transformer
Engine's modules. For the CPU the sums equal what autograd really saves (tests/unit/planning/test_memory.py and
benchmarks/benchmark_memory.py count it); for GPUs they are derived in the same way and have not been measured.

Letters in comments: `t` tokens, `h` hidden, `f` feed-forward, `n` heads, `d` head width, `v` vocabulary, `m` masked
tokens; `e` bytes of an element, 2 or 4. A tensor-parallel rank has its share of f, n and v.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_neobert.config.schema import Settings

Kernels = Literal["cpu", "gpu", "transformer_engine"]  # of torch on the one or the other, or Transformer Engine's
STATISTIC = 4  # bytes of a float32, as norms and attention keep some per token
TOKEN_ID = 8


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch on one rank.

    Args:
        masked_tokens: Positions that the head computes on this rank.
        vocab_size: Tokens of the tokenizer, unpadded.
    """

    settings: Settings
    kernels: Kernels
    masked_tokens: int
    vocab_size: int

    # ---- sizes

    @property
    def element(self) -> int:
        return 2 if self.settings.training.bf16 else 4

    @property
    def tokens(self) -> int:
        """Of this context-parallel rank."""
        return self.settings.slots_per_micro_batch // self.settings.parallel.context_parallel_size

    @property
    def tokens_of_norms(self) -> int:
        """Sequence parallelism shares out what lies between the matrices."""
        parallel = self.settings.parallel
        return self.tokens // (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)

    def share(self, size: int) -> int:
        """Of something that tensor parallelism divides: heads x head width, feed-forward, vocabulary."""
        return size // self.settings.parallel.tensor_model_parallel_size

    @property
    def hidden_bytes(self) -> int:
        """The hidden states between two layers: e h t."""
        return self.element * self.settings.model.hidden_size * self.tokens_of_norms

    @property
    def logits(self) -> int:
        """How many: m v."""
        padded = self.settings.model.padded_vocab_size(
            self.vocab_size, tensor_parallel=self.settings.parallel.tensor_model_parallel_size
        )
        return self.masked_tokens * self.share(padded)

    # ---- saved

    @property
    def layer_bytes(self) -> int:
        """One layer without recomputation."""
        return 2 * self._norm_bytes + self.attention_bytes + self.projection_input_bytes + self._mlp_bytes

    @property
    def final_norm_bytes(self) -> int:
        """Without its output: the head reads some rows of it, which are counted there."""
        return self._norm_bytes - self.hidden_bytes

    @property
    def head_bytes(self) -> int:
        """Hidden states and probabilities (float32) of the masked tokens, and the labels' places."""
        hidden = self.element * self.settings.model.hidden_size * self.masked_tokens
        return hidden + STATISTIC * self.logits + (2 * TOKEN_ID + 2) * self.masked_tokens

    @property
    def embedding_bytes(self) -> int:
        """Which rows of the tables: token ids, and positions where these are learned."""
        return TOKEN_ID * self.tokens * (2 if self.settings.model.position_rows else 1)

    @property
    def _norm_bytes(self) -> int:
        """Input, statistics, and the output, which the matrix behind it keeps."""
        model = self.settings.model
        if self.kernels == "cpu" and model.normalization == "RMSNorm":
            # Torch has no fused one for CPUs: the input and the input over its root mean square, both in float32.
            return self.tokens_of_norms * STATISTIC * (2 * model.hidden_size + 1) + self.hidden_bytes
        statistics = 2 * (self.element if self.kernels == "cpu" else STATISTIC)
        if model.normalization == "RMSNorm":
            statistics = STATISTIC
        return 2 * self.hidden_bytes + self.tokens_of_norms * statistics

    @property
    def _context_bytes(self) -> int:
        """Queries, keys, values or the attention's result: e h t for a share of the heads."""
        return self.element * self.share(self.settings.model.hidden_size) * self.tokens

    @property
    def projection_input_bytes(self) -> int:
        """What the matrix behind the attention keeps: the result, unless that is the kernel's own output."""
        return self._context_bytes

    @property
    def attention_bytes(self) -> int:
        """Of rotation, exchange between context-parallel ranks and kernel; what recomputing attention saves."""
        model, parallel = self.settings.model, self.settings.parallel
        exchanged, rotated = parallel.context_parallel_size > 1, model.position_embedding_type == "rope"
        # The values are a slice of the projection's output, of which the whole stays, queries and keys included;
        # an exchange copies them out, and so does Transformer Engine.
        sliced = not exchanged and self.kernels != "transformer_engine"
        inputs = (3 if sliced else 1) + (2 if rotated or not sliced else 0)
        # Kernels that take a document at a time have their results put together; others return the result itself.
        copied = exchanged or self.kernels == "cpu" or not self.settings.training.bf16
        logsumexp = STATISTIC * self.share(model.num_attention_heads) * self.tokens
        return (inputs + copied) * self._context_bytes + logsumexp + (self._angle_bytes if rotated else 0)

    @property
    def _angle_bytes(self) -> int:
        """Cosine and sine of the whole row, e d t each, for queries and for keys; the fused kernel needs neither."""
        model = self.settings.model
        if self.kernels == "transformer_engine":
            return 0
        width = model.hidden_size // model.num_attention_heads
        return 4 * self.element * width * self.settings.slots_per_micro_batch

    @property
    def attention_input_bytes(self) -> int:
        """What recomputing attention alone starts from: the projection's output, 3 e h t."""
        return 3 * self._context_bytes

    @property
    def _feed_forward_bytes(self) -> int:
        """Of one half of SwiGLU: e f t."""
        return self.element * self.share(self.settings.model.ffn_width) * self.tokens

    @property
    def _mlp_bytes(self) -> int:
        """Both halves, and their product, which the second matrix keeps; unfused, both factors as well."""
        if not self.settings.model.swiglu:
            return 2 * self._feed_forward_bytes
        return (5 if self.kernels == "cpu" else 3) * self._feed_forward_bytes

    # ---- at work

    @property
    def forward_work_bytes(self) -> int:
        """At the end of the forward pass: the last hidden states, and the logits before the bias is added."""
        return self.hidden_bytes + self.element * self.logits

    @property
    def layer_work_bytes(self) -> int:
        """When the backward pass enters a layer: the gradients of its output and of what SwiGLU multiplies."""
        factors = 2 if self.settings.model.swiglu else 1
        return self.hidden_bytes + factors * self._feed_forward_bytes

    @property
    def head_work_bytes(self) -> int:
        """In the head's backward pass: either a copy of the logits' gradient, or the gradient of its weights."""
        model = self.settings.model
        weights = self.element * self.logits // max(1, self.masked_tokens) * model.hidden_size
        if self.kernels != "cpu" and self.settings.compute.gradient_accumulation_fusion:
            weights = 0
        freed = (STATISTIC - self.element) * self.logits  # by then; in float32 the copy takes the room
        return max(self.element * self.logits, weights - freed)
