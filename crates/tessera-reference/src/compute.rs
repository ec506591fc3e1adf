//! Computes the ops of one rank, element by element.

mod attention;
mod expert_features;
mod experts;
mod heads;
mod image;
mod language;
mod norms;
mod pixels;
mod rows;

use tessera_base::random::{DrawKey, fill_normals, fill_words};
use tessera_ir::{Activation, ComputeOp, DType, Op, StochasticRounding, Type, ValueId, views};
use tessera_mesh::{Coord, Mesh, Rank};

use crate::rank_values::RankValues;
use crate::round::{Rounding, rounding_to};
use crate::tensor::TensorResult;
use crate::{Tensor, tile_ops};

pub(crate) use language::write_pages;

/// The position of an operand in its global tensor: the start of each dim on this rank, and the
/// global extents.
#[derive(Debug)]
struct GlobalPosition {
    start: Vec<usize>,
    global: Vec<usize>,
}

impl GlobalPosition {
    /// Returns the position of a value of this type at a mesh coordinate.
    fn from_type(ty: &Type, mesh: &Mesh, coord: Coord) -> GlobalPosition {
        let ranges = ty.layout.global_ranges(&ty.shape, mesh, coord);
        GlobalPosition {
            start: ranges.iter().map(|(s, _)| *s as usize).collect(),
            global: ty.layout.global_shape(&ty.shape, mesh).iter().map(|n| *n as usize).collect(),
        }
    }

    /// Returns the index in the global tensor of element `i` of a shard of this shape.
    fn global_index(&self, shape: &[usize], i: usize) -> usize {
        // Convert the local index to coordinates and these to the global index.
        let (mut rest, mut global, mut step) = (i, 0, 1);
        for dim in (0..shape.len()).rev() {
            global += (rest % shape[dim] + self.start[dim]) * step;
            rest /= shape[dim];
            step *= self.global[dim];
        }
        global
    }

    /// Returns the global index of local row `i`.
    fn global_row(&self, i: usize) -> usize {
        self.start.first().copied().unwrap_or(0) + i
    }
}

/// The values that an op can read, and the place of its rank.
pub(crate) struct OpContext<'a> {
    pub(crate) values: &'a RankValues<'a>,
    pub(crate) mesh: &'a Mesh,
    pub(crate) rank: Rank,
    pub(crate) op: &'a Op,
    /// The buffer to which the op refers.
    pub(crate) buffer: Option<Tensor>,
}

impl<'a> OpContext<'a> {
    fn tensor(&self, v: ValueId) -> Result<&'a Tensor, String> {
        self.values.tensor_value(v)
    }

    fn int(&self, v: ValueId) -> Result<i64, String> {
        self.values.int_value(v)
    }

    fn scalar(&self, v: ValueId) -> Result<f64, String> {
        self.values.float_scalar(v)
    }

    fn position(&self, v: ValueId) -> GlobalPosition {
        GlobalPosition::from_type(self.values.type_of(v), self.mesh, self.mesh.coord_of(self.rank))
    }
}

/// Computes the results of a compute op.
pub(crate) fn evaluate_op(cx: &OpContext<'_>, view: ComputeOp<'_>) -> Result<Vec<Tensor>, String> {
    use ComputeOp as V;
    let result = match view {
        V::Matmul(v) => matmul(cx, v),
        V::BiasAct(v) => add_bias(cx.tensor(v.x)?, Some(cx.tensor(v.bias)?), v.act),
        V::Add(v) => zip_elements(cx.tensor(v.x)?, cx.tensor(v.y)?, |a, b| a + b),
        V::Mul(v) => zip_elements(cx.tensor(v.x)?, cx.tensor(v.y)?, |a, b| a * b),
        V::Silu(v) => Ok(map_elements(cx.tensor(v.x)?, silu)),
        V::Relu(v) => Ok(map_elements(cx.tensor(v.x)?, |x| if x < 0.0 { 0.0 } else { x })),
        V::Cast(v) => {
            let round = rounding_to(v.to).ok_or_else(|| format!("no rounding for {}", v.to))?;
            let x = cx.tensor(v.x)?;
            Ok(match v.stochastic_rounding() {
                None => map_elements(x, |x| round.round_nearest(x)),
                Some(draws) => round_stochastically(x, &round, draws, &cx.position(v.x)),
            })
        }
        V::Quantize(v) => {
            let (rows, scales) = match v.stochastic_rounding() {
                None => quantize_rows(cx.tensor(v.x)?)?,
                Some(draws) => {
                    let (rows, scales) = divide_by_row_scales(cx.tensor(v.x)?)?;
                    (round_stochastically(&rows, &e4m3_rounding()?, draws, &cx.position(v.x)), scales)
                }
            };
            return Ok(vec![rows, scales]);
        }
        V::LayerNorm(v) => norms::layer_norm(cx, v),
        V::Modulation(v) => norms::modulation(cx, v),
        V::NormModulate(v) => norms::norm_modulate(cx, v),
        V::GateResidual(v) => norms::gate_residual(cx, v),
        V::RmsNorm(v) => norms::rms_norm(cx, v),
        V::RowSquareSum(v) => norms::row_square_sum(cx, v),
        V::RmsScale(v) => norms::rms_scale(cx, v),
        V::Rope(v) => attention::rope(cx, v),
        V::Attention(v) => attention::attention(cx, v),
        V::RelativeAttention(v) => attention::relative_attention(cx, v),
        V::Rotary(v) => language::rotary(cx, v),
        V::HeadNorm(v) => language::head_norm(cx, v),
        V::HeadColumns(v) => heads::head_columns(cx, v),
        V::HeadJoin(v) => heads::head_join(cx, v),
        V::HeadMatmul(v) => heads::head_matmul(cx, v),
        V::PagedAttention(v) => language::paged_attention(cx, v),
        V::Sample(v) => language::sample(cx, v),
        V::Softmax(v) => tile_ops::softmax(v, cx.tensor(v.x)?),
        V::Bmm(v) => tile_ops::batched_matmul(v, cx.tensor(v.x)?, cx.tensor(v.y)?),
        V::MoeRoute(v) => {
            let experts = cx.buffer.as_ref().ok_or("names no buffer")?;
            tile_ops::moe_route(v, cx.tensor(v.x)?, cx.tensor(v.gates)?, experts)
        }
        V::TopKExperts(v) => experts::top_k_experts(cx, v),
        V::ExpertWeights(v) => experts::expert_weights(cx, v),
        V::ExpertTokens(v) => experts::expert_tokens(cx, v),
        V::ExpertGates(v) => experts::expert_gates(cx, v),
        V::ExpertLocality(v) => expert_features::expert_locality(cx, v),
        V::ExpertDistance(v) => expert_features::expert_distance(cx, v),
        V::ExpertDistanceGradient(v) => expert_features::expert_distance_gradient(cx, v),
        V::ExpertPlaces(v) => experts::expert_places(cx, v),
        V::ExpertDraw(v) => expert_features::expert_draw(cx, v),
        V::ExpertReroute(v) => experts::expert_reroute(cx, v),
        V::ExpertSlots(v) => experts::expert_slots(cx, v),
        V::ExpertCounts(v) => experts::expert_counts(cx, v),
        V::ExpertStatistics(v) => experts::expert_statistics(cx, v),
        V::ExpertPack(v) => experts::expert_pack(cx, v),
        V::ExpertPackFused(v) => experts::expert_pack_fused(cx, v),
        V::GroupedMatmul(v) => experts::grouped_matmul(cx, v),
        V::ExpertCombine(v) => experts::expert_combine(cx, v),
        V::TimeEmbed(v) => time_embed(cx, v),
        V::Renoise(v) => renoise(cx, v),
        V::ToX0(v) => {
            let sigma = cx.scalar(v.sigma)?;
            zip_elements(cx.tensor(v.x)?, cx.tensor(v.flow)?, |x, flow| x - sigma * flow)
        }
        V::Guide(v) => zip_elements(cx.tensor(v.x)?, cx.tensor(v.y)?, |x, y| y + v.scale * (x - y)),
        V::SpaceTimeToDepth(v) => pixels::space_time_to_depth(cx, v),
        V::DepthToSpaceTime(v) => pixels::depth_to_space_time(cx, v),
        V::Conv3d(v) => image::conv3d(cx, v),
        V::UpsampleNearest(v) => image::upsample_nearest(cx, v),
        V::ChannelsToFrames(v) => image::channels_to_frames(cx, v),
        V::Patchify(v) => image::patchify(cx, v),
        V::Unpatchify(v) => image::unpatchify(cx, v),
        V::ScaleShift(v) => image::scale_shift(cx, v),
        V::Clamp(v) => Ok(map_elements(cx.tensor(v.x)?, |x| x.clamp(-v.limit, v.limit))),
        V::SoftClamp(v) => Ok(map_elements(cx.tensor(v.x)?, |x| v.limit * (x / v.limit).tanh())),
        V::Embed(v) => rows::embed(cx, v),
        V::TakeRows(v) => rows::take_rows(cx, v),
        V::TakeShard(v) => rows::take_own_shard(cx, v),
        V::Pad(v) => rows::pad_rows(cx, v),
        V::Compact(v) => rows::compact_rows(cx, v),
    };
    Ok(vec![result?])
}

/// Reshapes a patch convolution [d, C, 1, ph, pw] to rows of (ph, pw, C), as [d, ph·pw·C].
pub(crate) fn flatten_patches(w: &Tensor) -> TensorResult {
    let [d, c, 1, ph, pw] = w.shape()[..] else {
        return Err(format!("expected a patch convolution, got shape {:?}", w.shape()));
    };
    let width = ph * pw * c;
    Ok(Tensor::from_fn(&[d, width], |i| {
        let (row, rest) = (i / width, i % width);
        let (p, q, channel) = (rest / (pw * c), rest / c % pw, rest % c);
        w.data()[((row * c + channel) * ph + p) * pw + q]
    }))
}

/// Reshapes a convolution [m, c, taps…] to rows of (taps…, c), as [m, taps·c].
pub(crate) fn flatten_convolution(w: &Tensor) -> TensorResult {
    let [m, c, taps @ ..] = w.shape() else {
        return Err(format!("expected a convolution, got shape {:?}", w.shape()));
    };
    let taps: usize = taps.iter().product();
    Ok(Tensor::from_fn(&[*m, taps * c], |i| {
        let (row, tap, channel) = (i / (taps * c), i / c % taps, i % c);
        w.data()[(row * c + channel) * taps + tap]
    }))
}

/// Reshapes a convolution [m, 2·c, kh, kw], whose channels are those of a frame and then those of the frame
/// before it, to rows of (frame, kh, kw, c) with the frame before first, as [m, 2·kh·kw·c].
pub(crate) fn flatten_past_convolution(w: &Tensor) -> TensorResult {
    let [m, channels, kh, kw] = w.shape()[..] else {
        return Err(format!("expected a convolution within frames, got shape {:?}", w.shape()));
    };
    if channels % 2 != 0 {
        return Err(format!("{channels} channels of two frames"));
    }
    let (c, cells) = (channels / 2, kh * kw);
    Ok(Tensor::from_fn(&[m, channels * cells], |i| {
        let (row, rest) = (i / (channels * cells), i % (channels * cells));
        let (frame, cell, channel) = (rest / (cells * c), rest / c % cells, rest % c);
        w.data()[(row * channels + (1 - frame) * c + channel) * cells + cell]
    }))
}

/// Rounds each element by the word of its place in the global tensor, where x starts at a row of its own.
fn round_stochastically(
    x: &Tensor,
    to: &Rounding,
    draws: StochasticRounding,
    position: &GlobalPosition,
) -> Tensor {
    let row_elements: usize = position.global.iter().skip(1).product();
    let skipped = draws.first_row as usize * row_elements;
    Tensor::from_fn(x.shape(), |i| {
        let mut word = [0];
        fill_words(draws.key, (skipped + position.global_index(x.shape(), i)) as u64, &mut word);
        to.round_by_word(x.data()[i], word[0])
    })
}

/// Quantizes a matrix to e4m3 with one f32 scale per row, to nearest. Returns the elements and the scales.
pub(crate) fn quantize_rows(x: &Tensor) -> Result<(Tensor, Tensor), String> {
    let (rows, scales) = divide_by_row_scales(x)?;
    let e4m3 = e4m3_rounding()?;
    Ok((map_elements(&rows, |x| e4m3.round_nearest(x)), scales))
}

/// Divides the rows of a matrix by their scales, in f32. Returns the quotients and the scales.
fn divide_by_row_scales(x: &Tensor) -> Result<(Tensor, Tensor), String> {
    let (n, k) = matrix_extents(x)?;
    let f32 = rounding_to(DType::F32).ok_or("no rounding for f32")?;
    let scale = |i: usize| match x.row(i).iter().fold(0.0, |max_abs: f64, x| max_abs.max(x.abs())) {
        0.0 => 1.0,
        max_abs => f32.round_nearest(max_abs / 448.0),
    };
    let scales = Tensor::from_fn(&[n], scale);
    let rows = Tensor::from_fn(&[n, k], |i| f32.round_nearest(x.data()[i] / scales.data()[i / k]));
    Ok((rows, scales))
}

fn e4m3_rounding() -> Result<Rounding, String> {
    rounding_to(DType::E4m3).ok_or_else(|| "no rounding for e4m3".to_string())
}

fn matmul(cx: &OpContext<'_>, v: &views::Matmul) -> TensorResult {
    let (x, w) = (cx.tensor(v.x)?, cx.tensor(v.w)?);
    let ((n, k), (m, k2)) = (matrix_extents(x)?, matrix_extents(w)?);
    if k != k2 {
        return Err(format!("inner extents {k} and {k2} differ"));
    }
    let scale = |given_scale: Option<ValueId>, rows| match given_scale {
        Some(s) => vector_data(cx.tensor(s)?, rows).map(<[f64]>::to_vec),
        None => Ok(vec![1.0; rows]),
    };
    let (xs, ws) = (scale(v.x_scale, n)?, scale(v.w_scale, m)?);
    let y = Tensor::from_fn(&[n, m], |i| {
        let sum: f64 = x.row(i / m).iter().zip(w.row(i % m)).map(|(a, b)| a * b).sum();
        sum * xs[i / m] * ws[i % m]
    });
    add_bias(&y, v.bias.map(|b| cx.tensor(b)).transpose()?, v.act)
}

/// Computes act(x + bias), with the bias broadcast over the rows.
fn add_bias(x: &Tensor, bias: Option<&Tensor>, act: Option<Activation>) -> TensorResult {
    let (_, m) = matrix_extents(x)?;
    let mut y = x.clone();
    if let Some(b) = bias {
        let b = vector_data(b, m)?;
        y.data_mut().iter_mut().enumerate().for_each(|(i, y)| *y += b[i % m]);
    }
    Ok(map_elements(&y, |y| activate(act, y)))
}

/// Applies an activation, if there is one.
fn activate(act: Option<Activation>, x: f64) -> f64 {
    match act {
        None => x,
        Some(Activation::Silu) => silu(x),
        Some(Activation::GeluTanh) => gelu_tanh(x),
    }
}

fn time_embed(cx: &OpContext<'_>, v: &views::TimeEmbed) -> TensorResult {
    let timesteps = cx.tensor(v.timesteps)?;
    let [f] = timesteps.shape()[..] else {
        return Err(format!("timesteps have shape {:?}, expected [f]", timesteps.shape()));
    };
    let half = v.width as usize / 2;
    Ok(Tensor::from_fn(&[f, 2 * half], |i| {
        let (t, c) = (timesteps.data()[i / (2 * half)], i % (2 * half));
        let angle = t * 10000f64.powf(-((c % half) as f64) / half as f64);
        if c < half { angle.cos() } else { angle.sin() }
    }))
}

fn renoise(cx: &OpContext<'_>, v: &views::Renoise) -> TensorResult {
    let (x, sigma, position) = (cx.tensor(v.x)?, cx.scalar(v.sigma)?, cx.position(v.x));
    let small =
        |v: ValueId, name: &str| u32::try_from(cx.int(v)?).map_err(|_| format!("`{name}` exceeds 32 bits"));
    let key = DrawKey {
        seed: cx.int(v.seed)? as u64,
        chunk: small(v.chunk, "chunk")?,
        draw: small(v.draw, "draw")?,
    };
    let shape = x.shape();
    Ok(Tensor::from_fn(shape, |i| {
        let mut draw = [0.0f32];
        fill_normals(key, position.global_index(shape, i) as u64, &mut draw);
        (1.0 - sigma) * x.data()[i] + sigma * f64::from(draw[0])
    }))
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

fn map_elements(x: &Tensor, f: impl Fn(f64) -> f64) -> Tensor {
    Tensor::from_fn(x.shape(), |i| f(x.data()[i]))
}

fn zip_elements(a: &Tensor, b: &Tensor, f: impl Fn(f64, f64) -> f64) -> TensorResult {
    if a.shape() != b.shape() {
        return Err(format!("shapes {:?} and {:?} differ", a.shape(), b.shape()));
    }
    Ok(Tensor::from_fn(a.shape(), |i| f(a.data()[i], b.data()[i])))
}

fn matrix_extents(t: &Tensor) -> Result<(usize, usize), String> {
    match t.shape()[..] {
        [n, d] => Ok((n, d)),
        _ => Err(format!("{:?} is not a matrix", t.shape())),
    }
}

/// Returns the number of rows of a tensor and their length, the last extent.
fn row_extents(t: &Tensor) -> Result<(usize, usize), String> {
    match t.shape().split_last() {
        Some((d, rows)) if !rows.is_empty() => Ok((rows.iter().product(), *d)),
        _ => Err(format!("{:?} has no rows", t.shape())),
    }
}

fn vector_data(t: &Tensor, d: usize) -> Result<&[f64], String> {
    if t.shape() == [d] { Ok(t.data()) } else { Err(format!("vector {:?} for rows of {d}", t.shape())) }
}
