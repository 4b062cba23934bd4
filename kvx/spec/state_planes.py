"""State planes: what a recurrent layer keeps for a request, read from its model's config. No dtype yet, and no engine's layout.

One place for all who need it: sizes, the specs a cache is made from, and what each engine takes. A convolution's plane has the taps
that the next token reads, one fewer than its kernel; Transformers keeps one more, `num_unused`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvx.errors import BadArgument
from kvx.spec.cache_spec import PlaneSpec
from kvx.spec.config_fields import ConfigFields
from kvx.spec.state_spec import state_plane

Shares = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StatePlane:
    name: str  # conv, conv2, ...; ssm; delta: as kvx/layout/state_rows.py orders them
    axes: tuple[tuple[str, int], ...]
    shares: Shares = ()  # (size, unit) of parts that ranks share out one by one; (): one part
    is_f32: bool = False  # in Transformers, whatever the model's dtype
    num_unused: int = 0  # columns that Transformers keeps and no token reads

    @property
    def is_conv(self) -> bool:
        return self.name.startswith("conv")

    def format(self, model_format: str, state_format: str = "") -> str:
        """Its dtype: of convolutions the model's, of the others `state_format`, or by default that of Transformers."""
        return ("" if self.is_conv else state_format) or ("f32" if self.is_f32 else model_format)

    def spec(self, model_format: str, state_format: str = "") -> PlaneSpec:
        axes = {k: v for k, v in self.axes if (k, v) != ("column", 1)}
        return state_plane(self.name, self.format(model_format, state_format), shares=self.shares, **axes)

    @property
    def transformers_elements(self) -> int:
        """With the columns that Transformers keeps beside."""
        return prod(size + (self.num_unused if axis == "tap" else 0) for axis, size in self.axes)

    def __str__(self) -> str:
        return f"{self.name} {' x '.join(str(size) for axis, size in self.axes if (axis, size) != ('column', 1))}"


@dataclass(frozen=True)
class LayerState:
    """A kind of recurrent layer, and its planes."""

    name: str
    planes: tuple[StatePlane, ...]


def layer_state(config: ConfigFields, kind: str) -> LayerState | None:
    """Of a layer of this type (a word of `layer_types`); None: its fields say nothing that is known here."""
    is_beside = kind.startswith("hybrid")
    if config.model_type == "zaya" and is_beside:
        return LayerState("CCA", _cca(config))
    if config.model_type == "inkling_text" and is_beside:
        return LayerState("4 convs", _four_convs(config, kind))
    if kind in ("conv", "short_conv"):
        return LayerState("short conv", (_conv(config.int_of("hidden_size"), config.int_of("conv_L_cache")),))
    if kind == "recurrent" and ("lru_width" in config or "conv1d_width" in config):
        width = config.int_of("lru_width", 0) or config.int_of("hidden_size")
        conv = _conv(width, config.int_of("conv1d_width"), num_unused=0)
        return LayerState("RG-LRU", (conv, StatePlane("ssm", (("channel", width), ("column", 1)), is_f32=True)))
    if "linear_num_key_heads" in config or "linear_num_value_heads" in config:
        return LayerState("GDN", _gdn(config))
    if isinstance(config.get("linear_attn_config"), dict) or "linear_num_heads" in config or config.model_type == "bailing_hybrid":
        return LayerState("KDA", _kda(config))
    if _first(config, "mamba_d_state", "ssm_state_size", "state_size"):
        has_heads = _first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads") or config.model_type == "mamba2"
        return (
            LayerState("Mamba-2", _mamba2(config))
            if has_heads and config.model_type != "zamba"
            else LayerState("Mamba", _mamba1(config))
        )
    if "attn_type_list" in config or config.model_type == "minimax":
        heads = config.int_of("num_attention_heads")
        dim = config.int_of("head_dim", 0) or config.int_of("hidden_size") // heads
        return LayerState("lightning", (StatePlane("delta", (("head", heads), ("row", dim), ("column", dim))),))
    return None


def _conv(
    channels: int, kernel: int, shares: Shares = (), *, name: str = "conv", is_f32: bool = False, num_unused: int = 1
) -> StatePlane:
    if kernel < 2:
        raise BadArgument(f"size(): a convolution of {channels} channels has a kernel of {kernel}; it takes 2 or more.")
    return StatePlane(name, (("channel", channels), ("tap", kernel - 1)), shares, is_f32, num_unused)


def _gdn(config: ConfigFields) -> tuple[StatePlane, ...]:
    """Gated delta net: a convolution over q, k and v, and a matrix of key by value a value head."""
    attention_heads = config.int_of("num_attention_heads", 0)  # Olmo-Hybrid: as many, by default
    k_heads, v_heads = (config.int_of(f"linear_num_{x}_heads", attention_heads) for x in ("key", "value"))
    k_dim, v_dim = config.int_of("linear_key_head_dim"), config.int_of("linear_value_head_dim")
    shares = ((k_heads * k_dim, k_dim), (k_heads * k_dim, k_dim), (v_heads * v_dim, v_dim))
    conv = _conv(2 * k_heads * k_dim + v_heads * v_dim, config.int_of("linear_conv_kernel_dim"), shares)
    return conv, StatePlane("delta", (("head", v_heads), ("row", k_dim), ("column", v_dim)), is_f32=True)


def _kda(config: ConfigFields) -> tuple[StatePlane, ...]:
    """Kimi delta attention: the same with as many key heads as value heads, all of one dim."""
    own = config.get("linear_attn_config")
    inner = ConfigFields(config.name, own if isinstance(own, dict) else {})
    is_bailing = config.model_type == "bailing_hybrid"  # its linear heads are those of its attention

    def value(there: str, here: str, other: str) -> int:
        return inner.int_of(there) if there in inner else config.int_of(here if here in config or not is_bailing else other)

    heads = value("num_heads", "linear_num_heads", "num_attention_heads")
    dim = value("head_dim", "linear_head_dim", "head_dim")
    kernel = value("short_conv_kernel_size", "linear_conv_kernel_dim", "short_conv_kernel_size")
    width = heads * dim
    return (
        _conv(3 * width, kernel, ((width, dim),) * 3),
        StatePlane("delta", (("head", heads), ("row", dim), ("column", dim)), is_f32=True),
    )


def _mamba2(config: ConfigFields) -> tuple[StatePlane, ...]:
    """A convolution over x, B and C, and a matrix of head dim by state size a head."""
    own = config.model_type == "mamba2"
    heads = config.int_of("num_heads") if own else _int(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    size = _int(config, "mamba_d_state", "ssm_state_size", "state_size")
    groups = _int(config, "mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    kernel = _int(config, "mamba_d_conv", "conv_kernel")
    dim = _int(config, *(["head_dim"] if own else ["mamba_head_dim", "mamba_d_head", "mamba_headdim"]), default=0)
    inner = config.int_of("mamba_d_ssm", 0) or (heads * dim if "mamba_head_dim" in config else 0) or _expanded(config)
    dim = dim or inner // heads
    conv = _conv(inner + 2 * groups * size, kernel, ((inner, dim), (groups * size, size), (groups * size, size)))
    return conv, StatePlane("ssm", (("head", heads), ("row", dim), ("column", size)), is_f32=True)


def _mamba1(config: ConfigFields) -> tuple[StatePlane, ...]:
    """A convolution over x, and a row of the state's size a channel; Zamba's are in heads."""
    size, kernel = _int(config, "mamba_d_state", "ssm_state_size", "state_size"), _int(config, "mamba_d_conv", "conv_kernel")
    inner = _expanded(config)
    if config.model_type != "zamba":
        return _conv(inner, kernel), StatePlane("ssm", (("channel", inner), ("column", size)), is_f32=True)
    heads = config.int_of("n_mamba_heads")
    dim = inner // heads
    return _conv(inner, kernel, ((inner, dim),)), StatePlane("ssm", (("head", heads), ("row", dim), ("column", size)), is_f32=True)


def _cca(config: ConfigFields) -> tuple[StatePlane, ...]:
    """Zaya, beside K and V: q and k before two convolutions, and half of the last token's v."""
    dim = config.int_of("head_dim")
    q, kv = config.int_of("num_attention_heads") * dim, config.int_of("num_key_value_heads") * dim
    taps = config.int_of("cca_time0", 2) + config.int_of("cca_time1", 2) - 2
    conv = _conv(q + kv, taps + 1, ((q, dim), (kv, dim)), num_unused=0)
    return conv, StatePlane("ssm", (("channel", kv // 2), ("column", 1)))


def _four_convs(config: ConfigFields, kind: str) -> tuple[StatePlane, ...]:
    """Inkling, beside K and V: convolutions of k, v, and what goes into attention and MLP; in f32."""
    swa = "swa_" if kind == "hybrid_sliding" else ""
    dim = config.int_of(f"{swa}head_dim")
    kv, hidden = config.int_of(f"{swa}num_key_value_heads") * dim, config.int_of("hidden_size")
    kernel = _int(config, "conv_kernel_size", "sconv_kernel_size")
    sizes = {"conv": (kv, dim), "conv2": (kv, dim), "conv3": (hidden, 1), "conv4": (hidden, 1)}
    return tuple(_conv(size, kernel, ((size, unit),), name=name, is_f32=True) for name, (size, unit) in sizes.items())


def _expanded(config: ConfigFields) -> int:
    """The width inside a Mamba layer. `mamba_expand` may be a fraction."""
    if config.model_type in ("mamba", "falcon_mamba") and "intermediate_size" in config:
        return config.int_of("intermediate_size")
    expand = config.get("mamba_expand", config.get("expand"))
    if type(expand) not in (int, float):
        raise config.missing("mamba_expand", "expand") if expand is None else _wrong(config, "mamba_expand", expand)
    width = int(expand * config.int_of("hidden_size"))
    if width < 1:
        raise _wrong(config, "mamba_expand", expand)
    return width


def _first(config: ConfigFields, *names: str) -> str:
    return next((name for name in names if name in config), "")


def _int(config: ConfigFields, *names: str, default: int | None = None) -> int:
    """Of the first of these names that is there; "auto" is as if it was not."""
    name = next((n for n in names if n in config and config.get(n) != "auto"), "")
    if name:
        return config.int_of(name)
    if default is None:
        raise config.missing(*names)
    return default


def _wrong(config: ConfigFields, field: str, value: object) -> BadArgument:
    return BadArgument(f"size(): {field} of {config.name} is {value!r}; it takes a number over 0.")
