//! The kinds of attribute values: which [`Attr`]s an op accepts and as which Rust type a view holds
//! them. The op table names one kind per attribute.

use std::ops::Range;

use tessera_mesh::{Axis, Reduction};

use crate::DType;
use crate::attr::Attr;
use crate::expert_cache::EvictionPolicy;

/// Maximum number of elements of a value on one rank, and maximum of every count; a larger number
/// is assumed to be a mistake.
pub(crate) const MAX_ELEMENTS: u64 = 1 << 40;

/// The token policy that allows tokens of 8 bits.
pub(crate) const QUANTIZED_TOKENS: &str = "fp8_e4m3";

/// A kind of attribute.
pub trait AttrKind {
    /// Type of the attribute in a view.
    type Value;
    /// Description for messages, as in "`eps` must be a number ≥ 0".
    const EXPECTED: &'static str;
    /// Whether an op may omit the attribute.
    const OPTIONAL: bool = false;

    /// Converts an attribute; `None` if it has another type or is out of range.
    fn parse(attr: &Attr) -> Option<Self::Value>;

    /// Returns the value of an omitted attribute; `None` if the op must state it.
    fn omitted() -> Option<Self::Value> {
        None
    }
}

macro_rules! attr_kinds {
    ($($(#[$doc:meta])* $kind:ident: $value:ty, $expected:literal, $parse:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $kind;

        impl AttrKind for $kind {
            type Value = $value;
            const EXPECTED: &'static str = $expected;

            fn parse(attr: &Attr) -> Option<$value> {
                let parse: fn(&Attr) -> Option<$value> = $parse;
                parse(attr)
            }
        }
    )*};
}

attr_kinds! {
    /// An integer from 1 to 2⁴⁰, such as a number of rows.
    Count: u64, "an integer ≥ 1", |a| parse_index(a).filter(|n| *n > 0);
    /// An integer from 0 to 2⁴⁰, such as the index of a row or a position in a group.
    Index: u64, "an integer ≥ 0", parse_index;
    /// The index of a tensor dim.
    Dim: usize, "the index of a tensor dim", |a| usize::try_from(parse_index(a)?).ok();
    /// At least one integer from 0 to 2⁴⁰, such as the group of each expert.
    Indices: Vec<u64>, "a list of integers ≥ 0", |a| match a {
        Attr::Ints(list) if !list.is_empty() => list.iter().map(|i| parse_index(&Attr::Int(*i))).collect(),
        _ => None,
    };
    /// A probability above 0 and below 1.
    Probability: f64, "a number above 0 and below 1", |a| parse_number(a).filter(|x| *x > 0.0 && *x < 1.0);
    /// Any integer.
    Int: i64, "an integer", parse_int;
    /// A finite number.
    Number: f64, "a number", parse_number;
    /// A finite number that is not negative.
    NonNegative: f64, "a number ≥ 0", |a| parse_number(a).filter(|x| *x >= 0.0);
    /// A finite number above 0.
    Positive: f64, "a number above 0", |a| parse_number(a).filter(|x| *x > 0.0);
    /// A boolean.
    Flag: bool, "true or false", |a| if let Attr::Bool(b) = a { Some(*b) } else { None };
    /// A name that is not empty.
    Name: String, "a name", |a| parse_text(a).filter(|s| !s.is_empty()).map(str::to_string);
    /// The numerics policy of the tokens that a route of experts sends.
    TokenPolicy: String, "a numerics policy: f32, bf16 or fp8_e4m3", |a| {
        parse_text(a).filter(|s| ["f32", "bf16", QUANTIZED_TOKENS].contains(s)).map(str::to_string)
    };
    /// Rows `[from, to]`, the end excluded.
    RowRange: Range<u64>, "[from, to] with 0 ≤ from ≤ to", parse_range;
    /// A floating-point dtype to which a cast converts.
    CastDtype: DType, "f32, f64, bf16, f16 or e4m3", |a| {
        use DType::{Bf16, E4m3, F16, F32, F64};
        DType::parse(parse_text(a)?).filter(|d| matches!(d, F32 | F64 | Bf16 | F16 | E4m3))
    };
    /// The activation that follows a matmul or a bias.
    Act: Activation, "gelu_tanh or silu", |a| parse_choice(a, &Activation::ALL, Activation::name);
    /// The function that makes scores of the logits of a router.
    ScoreName: RouterScore, "softmax or sigmoid", |a| parse_choice(a, &RouterScore::ALL, RouterScore::name);
    /// How a conversion to a narrower dtype rounds.
    RoundingName: RoundingMode, "nearest or stochastic", |a| parse_choice(a, &RoundingMode::ALL, RoundingMode::name);
    /// A mesh axis.
    MeshAxis: Axis, "a mesh axis: tp, ep, pp or dp", |a| parse_text(a)?.parse().ok();
    /// The ranks among which a collective runs.
    GroupAxis: CommAxis, "a mesh axis (tp, ep, pp or dp) or world", |a| match parse_text(a)? {
        "world" => Some(CommAxis::World),
        axis => axis.parse().ok().map(CommAxis::Axis),
    };
    /// The reduction of a collective.
    ReductionName: Reduction, "a reduction: sum, tree or max", |a| Reduction::parse(parse_text(a)?);
    /// The transport of a collective.
    TransportName: Transport, "p2p or nccl", |a| parse_choice(a, &Transport::ALL, Transport::name);
    /// The algorithm that the tag of a sum names.
    AlgorithmName: CollectiveAlgorithm, "tree or ring", |a| parse_choice(a, &CollectiveAlgorithm::ALL, CollectiveAlgorithm::name);
    /// The form in which the elements of a collective travel.
    WireFormat: Wire, "fp8_e4m3", |a| parse_choice(a, &Wire::ALL, Wire::name);
    /// The rule by which experts stay in fast memory.
    PolicyName: EvictionPolicy, "lru or lru_hotness", |a| EvictionPolicy::from_name(parse_text(a)?);
    /// The transformation of a weight at load.
    LoadName: WeightLoad, "patch, conv, conv.past, e4m3, e4m3.scale, conv.e4m3 or conv.e4m3.scale", |a| parse_choice(a, &WeightLoad::ALL, WeightLoad::name);
}

/// `N` integers ≥ 1, such as a token grid.
#[derive(Debug)]
pub struct Extents<const N: usize>;

impl<const N: usize> AttrKind for Extents<N> {
    type Value = [u64; N];
    const EXPECTED: &'static str = match N {
        2 => "2 integers ≥ 1",
        3 => "3 integers ≥ 1",
        _ => "integers ≥ 1",
    };

    fn parse(attr: &Attr) -> Option<[u64; N]> {
        let Attr::Ints(list) = attr else { return None };
        let extents: Option<Vec<u64>> =
            list.iter().map(|i| u64::try_from(*i).ok().filter(|i| (1..=MAX_ELEMENTS).contains(i))).collect();
        extents?.try_into().ok()
    }
}

/// An attribute that an op may omit; the view then holds `None`.
#[derive(Debug)]
pub struct Opt<K>(K);

impl<K: AttrKind> AttrKind for Opt<K> {
    type Value = Option<K::Value>;
    const EXPECTED: &'static str = K::EXPECTED;
    const OPTIONAL: bool = true;

    fn parse(attr: &Attr) -> Option<Option<K::Value>> {
        K::parse(attr).map(Some)
    }

    fn omitted() -> Option<Option<K::Value>> {
        Some(None)
    }
}

/// An attribute with a default that is the integer `D`: for D = 0, `false` of a [`Flag`], softmax of a
/// [`ScoreName`] and nearest of a [`RoundingName`].
#[derive(Debug)]
pub struct Or<K, const D: u32>(K);

impl<K: AttrKind<Value: DefaultValue>, const D: u32> AttrKind for Or<K, D> {
    type Value = K::Value;
    const EXPECTED: &'static str = K::EXPECTED;
    const OPTIONAL: bool = true;

    fn parse(attr: &Attr) -> Option<K::Value> {
        K::parse(attr)
    }

    fn omitted() -> Option<K::Value> {
        Some(K::Value::from_default(D))
    }
}

/// A type whose values an [`Or`] can state as a number.
pub trait DefaultValue {
    /// Converts the default.
    fn from_default(default: u32) -> Self;
}

impl DefaultValue for u64 {
    fn from_default(default: u32) -> u64 {
        u64::from(default)
    }
}

impl DefaultValue for i64 {
    fn from_default(default: u32) -> i64 {
        i64::from(default)
    }
}

impl DefaultValue for f64 {
    fn from_default(default: u32) -> f64 {
        f64::from(default)
    }
}

impl DefaultValue for bool {
    fn from_default(default: u32) -> bool {
        default != 0
    }
}

impl DefaultValue for RouterScore {
    fn from_default(default: u32) -> RouterScore {
        if default == 0 { RouterScore::Softmax } else { RouterScore::Sigmoid }
    }
}

impl DefaultValue for RoundingMode {
    fn from_default(default: u32) -> RoundingMode {
        if default == 0 { RoundingMode::Nearest } else { RoundingMode::Stochastic }
    }
}

/// The activation of a fused op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activation {
    /// The tanh approximation of GELU.
    GeluTanh,
    /// x · sigmoid(x).
    Silu,
}

impl Activation {
    const ALL: [Activation; 2] = [Activation::GeluTanh, Activation::Silu];

    /// Returns the name in the text form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Activation::GeluTanh => "gelu_tanh",
            Activation::Silu => "silu",
        }
    }
}

/// The function that makes scores of the logits of a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RouterScore {
    /// Softmax over all experts.
    Softmax,
    /// The logistic function of each logit.
    Sigmoid,
}

impl RouterScore {
    const ALL: [RouterScore; 2] = [RouterScore::Softmax, RouterScore::Sigmoid];

    /// Returns the name in the text form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RouterScore::Softmax => "softmax",
            RouterScore::Sigmoid => "sigmoid",
        }
    }
}

/// How a conversion to a narrower dtype rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RoundingMode {
    /// To the nearest number, ties to even.
    Nearest,
    /// To one of the two neighbours, drawn so that the mean of many draws is the number itself.
    Stochastic,
}

impl RoundingMode {
    const ALL: [RoundingMode; 2] = [RoundingMode::Nearest, RoundingMode::Stochastic];

    /// Returns the name in the text form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RoundingMode::Nearest => "nearest",
            RoundingMode::Stochastic => "stochastic",
        }
    }
}

/// The transport that an op requests for its collective. Without a request, the faster one that can
/// connect the ranks is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Peer-to-peer kernels over memory that all members map.
    P2p,
    /// NCCL.
    Nccl,
}

impl Transport {
    const ALL: [Transport; 2] = [Transport::P2p, Transport::Nccl];

    /// Returns the name in the text form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Transport::P2p => "p2p",
            Transport::Nccl => "nccl",
        }
    }
}

/// The algorithm by which an all-reduce shall run. Without a tag, the library that carries its data
/// chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CollectiveAlgorithm {
    /// Reduction and broadcast over a tree: few steps, for small payloads.
    Tree,
    /// Shards pass around a ring: every link is busy all the time, for large payloads.
    Ring,
}

impl CollectiveAlgorithm {
    const ALL: [CollectiveAlgorithm; 2] = [CollectiveAlgorithm::Tree, CollectiveAlgorithm::Ring];

    /// Returns the name in the text form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CollectiveAlgorithm::Tree => "tree",
            CollectiveAlgorithm::Ring => "ring",
        }
    }
}

/// Elements that share one scale where e4m3 travels.
pub const WIRE_BLOCK: usize = 128;

/// The form in which the elements of a collective travel, if it is not that of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// e4m3, with one scale in f32 per [`WIRE_BLOCK`] elements.
    E4m3,
}

impl Wire {
    const ALL: [Wire; 1] = [Wire::E4m3];

    /// Returns the name in the text form, which is that of the token policy that allows the form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Wire::E4m3 => QUANTIZED_TOKENS,
        }
    }
}

/// How a weight is transformed when it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightLoad {
    /// Reorders a patch convolution [d, C, 1, ph, pw] into rows of (ph, pw, C).
    Patch,
    /// Reorders a convolution [m, c, kt, kh, kw] or [m, c, kh, kw] into rows of (kt, kh, kw, c).
    Conv,
    /// Reorders a convolution [m, 2·c, kh, kw] over the channels of a frame and then those of the frame
    /// before it into rows of (frame, kh, kw, c), the frame before first.
    ConvPast,
    /// The first result of `quantize` on the rows of the whole tensor.
    E4m3,
    /// The second result of `quantize`: one scale per row.
    E4m3Scale,
    /// The first result of `quantize` on the rows of `Conv`.
    ConvE4m3,
    /// The second result of `quantize` on the rows of `Conv`: one scale per channel of the result.
    ConvE4m3Scale,
}

impl WeightLoad {
    const ALL: [WeightLoad; 7] = [
        WeightLoad::Patch,
        WeightLoad::Conv,
        WeightLoad::ConvPast,
        WeightLoad::E4m3,
        WeightLoad::E4m3Scale,
        WeightLoad::ConvE4m3,
        WeightLoad::ConvE4m3Scale,
    ];

    /// Returns the name in the text form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            WeightLoad::Patch => "patch",
            WeightLoad::Conv => "conv",
            WeightLoad::ConvPast => "conv.past",
            WeightLoad::E4m3 => "e4m3",
            WeightLoad::E4m3Scale => "e4m3.scale",
            WeightLoad::ConvE4m3 => "conv.e4m3",
            WeightLoad::ConvE4m3Scale => "conv.e4m3.scale",
        }
    }

    /// Returns the transformation with this name; `None` if there is none.
    #[must_use]
    pub fn parse(name: &str) -> Option<WeightLoad> {
        WeightLoad::ALL.into_iter().find(|load| load.name() == name)
    }
}

/// The ranks that the `axis` of a collective names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommAxis {
    /// The groups of a mesh axis.
    Axis(Axis),
    /// All ranks, including those outside the mesh.
    World,
}

fn parse_int(attr: &Attr) -> Option<i64> {
    if let Attr::Int(i) = attr { Some(*i) } else { None }
}

fn parse_index(attr: &Attr) -> Option<u64> {
    u64::try_from(parse_int(attr)?).ok().filter(|i| *i <= MAX_ELEMENTS)
}

/// Converts a number; an integer may stand for a float.
fn parse_number(attr: &Attr) -> Option<f64> {
    match attr {
        Attr::Float(x) => Some(*x).filter(|x| x.is_finite()),
        Attr::Int(i) => Some(*i as f64),
        _ => None,
    }
}

fn parse_text(attr: &Attr) -> Option<&str> {
    if let Attr::Str(s) = attr { Some(s) } else { None }
}

fn parse_choice<T: Copy>(attr: &Attr, all: &[T], name: fn(T) -> &'static str) -> Option<T> {
    let text = parse_text(attr)?;
    all.iter().copied().find(|choice| name(*choice) == text)
}

fn parse_range(attr: &Attr) -> Option<Range<u64>> {
    let Attr::Ints(list) = attr else { return None };
    let [from, to] = list[..] else { return None };
    let (from, to) = (u64::try_from(from).ok()?, u64::try_from(to).ok()?);
    (from <= to).then_some(from..to)
}
