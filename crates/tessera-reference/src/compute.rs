//! Computes the ops of one rank, element by element.

use tessera_base::random::{DrawKey, fill_normals};
use tessera_ir::{DType, Op, Opcode, Type};
use tessera_mesh::{Coord, Mesh};

use crate::round::rounding_to;
use crate::{Tensor, tile_ops};

/// The position of an operand in its global tensor: the start of each dim on this rank, and the
/// global extents.
#[derive(Debug, Default)]
pub(crate) struct GlobalPosition {
    start: Vec<usize>,
    global: Vec<usize>,
}

impl GlobalPosition {
    /// Returns the position of a value of this type at a mesh coordinate.
    pub(crate) fn from_type(ty: &Type, mesh: &Mesh, coord: Coord) -> GlobalPosition {
        let ranges = ty.layout.global_ranges(&ty.shape, mesh, coord);
        GlobalPosition {
            start: ranges.iter().map(|(s, _)| *s as usize).collect(),
            global: ty.layout.global_shape(&ty.shape, mesh).iter().map(|n| *n as usize).collect(),
        }
    }

    /// Returns the global index of local row `i`.
    fn global_row(&self, i: usize) -> usize {
        self.start.first().copied().unwrap_or(0) + i
    }
}

type TensorResult = Result<Tensor, String>;

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

/// Quantizes a matrix to e4m3 rows with one scale per row.
pub(crate) fn quantize_rows(x: &Tensor) -> Result<(Tensor, Tensor), String> {
    let (n, k) = matrix_extents(x)?;
    let (Some(f32), Some(e4m3)) = (rounding_to(DType::F32), rounding_to(DType::E4m3)) else {
        return Err("no rounding for f32 or e4m3".to_string());
    };
    let scale = |i: usize| match x.row(i).iter().fold(0.0, |max_abs: f64, x| max_abs.max(x.abs())) {
        0.0 => 1.0,
        max_abs => f32.round_nearest(max_abs / 448.0),
    };
    let scales = Tensor::from_fn(&[n], scale);
    let rows = Tensor::from_fn(&[n, k], |i| {
        e4m3.round_nearest(f32.round_nearest(x.data()[i] / scales.data()[i / k]))
    });
    Ok((rows, scales))
}

/// Computes the result of a compute op.
pub(crate) fn evaluate_op<'a>(
    op: &Op,
    x: &[&Tensor],
    float: &dyn Fn(&str) -> Option<&'a Tensor>,
    int: &dyn Fn(&str) -> Option<i64>,
    place: &GlobalPosition,
) -> TensorResult {
    let cx = OpContext { op, operands: x, position: place };
    let scalar = |name: &str| match float(name).map(Tensor::data) {
        Some([v]) => Ok(*v),
        _ => Err(format!("`{name}` is not a scalar")),
    };
    let read_int = |name: &str| int(name).ok_or_else(|| format!("`{name}` is not an integer"));
    let need = if matches!(op.opcode, Opcode::GateResidual | Opcode::RowSquareSum) {
        1
    } else {
        op.opcode.table_row().operands.0
    };
    if x.len() < need {
        return Err(format!("too few operands: {}", x.len()));
    }
    match op.opcode {
        Opcode::Matmul => cx.matmul(float("bias"), [float("x_scale"), float("w_scale")]),
        Opcode::BiasAct => cx.bias_act(x[0], Some(x[1])),
        Opcode::Add => zip_elements(x[0], x[1], |a, b| a + b),
        Opcode::Silu => Ok(map_elements(x[0], silu)),
        Opcode::Cast => {
            let round = op.str_attr("to").and_then(DType::parse).and_then(rounding_to);
            let round = round.ok_or_else(|| "`to` names no floating-point dtype".to_string())?;
            Ok(map_elements(x[0], |x| round.round_nearest(x)))
        }
        Opcode::LayerNorm => cx.layer_norm(),
        Opcode::Modulation => cx.modulation(),
        Opcode::NormModulate => cx.norm_modulate(),
        Opcode::GateResidual => cx.gate_residual(),
        Opcode::RmsNorm => cx.rms_norm(),
        Opcode::RowSquareSum => cx.row_square_sum(),
        Opcode::RmsScale => cx.rms_scale(),
        Opcode::Rope => cx.rope(read_int("start")? as f64),
        Opcode::Attention => cx.attention(float("bias").map(|_| scalar("bias")).transpose()?),
        Opcode::Softmax => tile_ops::softmax(op, x[0]),
        Opcode::Bmm => tile_ops::batched_matmul(op, x[0], x[1]),
        Opcode::TimeEmbed => cx.time_embed(),
        Opcode::Renoise => {
            let small =
                |name: &str| u32::try_from(read_int(name)?).map_err(|_| format!("`{name}` exceeds 32 bits"));
            let key =
                DrawKey { seed: read_int("seed")? as u64, chunk: small("chunk")?, draw: small("draw")? };
            cx.renoise(scalar("sigma")?, key)
        }
        Opcode::ToX0 => {
            let sigma = scalar("sigma")?;
            zip_elements(x[0], x[1], |x, flow| x - sigma * flow)
        }
        Opcode::SpaceTimeToDepth => cx.space_time_to_depth(),
        Opcode::DepthToSpaceTime => cx.depth_to_space_time(),
        Opcode::TakeRows => {
            let (row, rows) = (cx.int_attr("row")?, cx.int_attr("rows")?);
            x[0].slice(0, row, rows)
                .ok_or_else(|| format!("rows {rows} from {row} are outside {:?}", x[0].shape()))
        }
        Opcode::Pad => cx.pad_rows(),
        Opcode::Compact => cx.compact_rows(),
        other => Err(format!("{} is not a compute op", other.name())),
    }
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

fn vector_data(t: &Tensor, d: usize) -> Result<&[f64], String> {
    if t.shape() == [d] { Ok(t.data()) } else { Err(format!("vector {:?} for rows of {d}", t.shape())) }
}

/// Returns the mean and the reciprocal standard deviation of a row.
fn row_moments(row: &[f64], eps: f64) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = row.iter().sum::<f64>() / n;
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (variance + eps).sqrt())
}

struct OpContext<'a> {
    op: &'a Op,
    operands: &'a [&'a Tensor],
    position: &'a GlobalPosition,
}

impl OpContext<'_> {
    fn int_attr(&self, name: &str) -> Result<usize, String> {
        let found = self.op.int_attr(name).and_then(|i| usize::try_from(i).ok());
        found.ok_or_else(|| format!("`{name}` is missing or negative"))
    }

    fn positive_attr(&self, name: &str) -> Result<usize, String> {
        match self.int_attr(name)? {
            0 => Err(format!("`{name}` is 0")),
            n => Ok(n),
        }
    }

    /// Returns the global index of local row `i` in the sequence of which the op's value may be a
    /// shard.
    fn global_token(&self, i: usize) -> Result<usize, String> {
        let first = if self.op.attrs.contains_key("first_row") { self.int_attr("first_row")? } else { 0 };
        Ok(first + self.position.global_row(i))
    }

    fn eps_attr(&self) -> Result<f64, String> {
        self.op.float_attr("eps").ok_or_else(|| "`eps` is missing".to_string())
    }

    fn extents_attr<const N: usize>(&self, name: &str) -> Result<[usize; N], String> {
        let v: Vec<usize> = self
            .op
            .ints_attr(name)
            .unwrap_or(&[])
            .iter()
            .filter_map(|i| usize::try_from(*i).ok())
            .filter(|i| *i > 0)
            .collect();
        v.try_into().map_err(|_| format!("`{name}` must be {N} positive integers"))
    }

    fn apply_activation(&self, y: f64) -> Result<f64, String> {
        match self.op.str_attr("act") {
            None => Ok(y),
            Some("silu") => Ok(silu(y)),
            Some("gelu_tanh") => Ok(gelu_tanh(y)),
            Some(other) => Err(format!("unknown activation act = \"{other}\"")),
        }
    }

    fn matmul(&self, bias: Option<&Tensor>, [x_scale, w_scale]: [Option<&Tensor>; 2]) -> TensorResult {
        let ((n, k), (m, k2)) = (matrix_extents(self.operands[0])?, matrix_extents(self.operands[1])?);
        if k != k2 {
            return Err(format!("inner extents {k} and {k2} differ"));
        }
        let scale = |given_scale: Option<&Tensor>, rows| match given_scale {
            Some(s) => vector_data(s, rows).map(<[f64]>::to_vec),
            None => Ok(vec![1.0; rows]),
        };
        let (xs, ws) = (scale(x_scale, n)?, scale(w_scale, m)?);
        let y = Tensor::from_fn(&[n, m], |i| {
            let sum: f64 =
                self.operands[0].row(i / m).iter().zip(self.operands[1].row(i % m)).map(|(a, b)| a * b).sum();
            sum * xs[i / m] * ws[i % m]
        });
        self.bias_act(&y, bias)
    }

    fn bias_act(&self, x: &Tensor, bias: Option<&Tensor>) -> TensorResult {
        let (_, m) = matrix_extents(x)?;
        let mut y = x.clone();
        if let Some(b) = bias {
            let b = vector_data(b, m)?;
            y.data_mut().iter_mut().enumerate().for_each(|(i, y)| *y += b[i % m]);
        }
        for v in y.data_mut() {
            *v = self.apply_activation(*v)?;
        }
        Ok(y)
    }

    fn layer_norm(&self) -> TensorResult {
        let ((_, d), eps) = (matrix_extents(self.operands[0])?, self.eps_attr()?);
        let (w, b) = (vector_data(self.operands[1], d)?, vector_data(self.operands[2], d)?);
        Ok(Tensor::from_fn(self.operands[0].shape(), |i| {
            let row = self.operands[0].row(i / d);
            let (mean, scale) = row_moments(row, eps);
            (row[i % d] - mean) * scale * w[i % d] + b[i % d]
        }))
    }

    fn modulation(&self) -> TensorResult {
        let [1, c, d] = self.operands[0].shape()[..] else {
            return Err(format!("table has shape {:?}, expected [1, c, d]", self.operands[0].shape()));
        };
        let (f, width) = matrix_extents(self.operands[1])?;
        if width != c * d && width != d {
            return Err(format!(
                "table {:?} does not fit an embedding with {width} columns",
                self.operands[0].shape()
            ));
        }
        Ok(Tensor::from_fn(&[f, c * d], |i| {
            let column = i % (c * d);
            self.operands[0].data()[column] + self.operands[1].row(i / (c * d))[column % width]
        }))
    }

    /// Returns column block `block` of the frame that contains local row `i`.
    fn frame_columns<'t>(
        &self,
        m: &'t Tensor,
        i: usize,
        d: usize,
        block: usize,
    ) -> Result<&'t [f64], String> {
        let (frames, width) = matrix_extents(m)?;
        let frame = self.global_token(i)? / self.positive_attr("frame_rows")?;
        if frame >= frames || (block + 1) * d > width {
            return Err(format!("frame {frame}, column block {block} is outside {:?}", m.shape()));
        }
        Ok(&m.row(frame)[block * d..(block + 1) * d])
    }

    fn norm_modulate(&self) -> TensorResult {
        let ((n, d), eps) = (matrix_extents(self.operands[0])?, self.eps_attr()?);
        let (scale, shift) = (self.int_attr("scale")?, self.int_attr("shift")?);
        let mut y = self.operands[0].clone();
        for i in 0..n {
            let (mean, norm) = row_moments(self.operands[0].row(i), eps);
            let (scale, shift) = (
                self.frame_columns(self.operands[1], i, d, scale)?,
                self.frame_columns(self.operands[1], i, d, shift)?,
            );
            for (j, v) in y.data_mut()[i * d..(i + 1) * d].iter_mut().enumerate() {
                *v = (*v - mean) * norm * (1.0 + scale[j]) + shift[j];
            }
        }
        Ok(y)
    }

    fn gate_residual(&self) -> TensorResult {
        let sum = zip_elements(self.operands[0], self.operands[1], |a, b| a + b)?;
        let Some(m) = self.operands.get(2) else { return Ok(sum) };
        let ((n, d), gate) = (matrix_extents(self.operands[0])?, self.int_attr("gate")?);
        let mut y = self.operands[0].clone();
        for i in 0..n {
            let gate = self.frame_columns(m, i, d, gate)?;
            for (j, v) in y.data_mut()[i * d..(i + 1) * d].iter_mut().enumerate() {
                *v += self.operands[1].row(i)[j] * gate[j];
            }
        }
        Ok(y)
    }

    fn rms_norm(&self) -> TensorResult {
        let ((_, d), eps) = (matrix_extents(self.operands[0])?, self.eps_attr()?);
        let w = vector_data(self.operands[1], d)?;
        Ok(Tensor::from_fn(self.operands[0].shape(), |i| {
            let row = self.operands[0].row(i / d);
            let mean = row.iter().map(|x| x * x).sum::<f64>() / d as f64;
            row[i % d] / (mean + eps).sqrt() * w[i % d]
        }))
    }

    fn row_square_sum(&self) -> TensorResult {
        let ((n, _), c) = (matrix_extents(self.operands[0])?, self.operands.len());
        if self.operands.iter().any(|x| matrix_extents(x).map(|(rows, _)| rows) != Ok(n)) {
            return Err("operands have different numbers of rows".to_string());
        }
        Ok(Tensor::from_fn(&[n, c], |i| self.operands[i % c].row(i / c).iter().map(|x| x * x).sum()))
    }

    fn rms_scale(&self) -> TensorResult {
        let ((n, d), (n2, cols)) = (matrix_extents(self.operands[0])?, matrix_extents(self.operands[1])?);
        let (col, width, eps) = (self.int_attr("col")?, self.positive_attr("width")?, self.eps_attr()?);
        if n != n2 || col >= cols {
            return Err(format!("sums {:?} do not fit column {col} for {n} rows", self.operands[1].shape()));
        }
        let w = vector_data(self.operands[2], d)?;
        Ok(Tensor::from_fn(&[n, d], |i| {
            let mean = self.operands[1].row(i / d)[col] / width as f64;
            self.operands[0].data()[i] / (mean + eps).sqrt() * w[i % d]
        }))
    }

    fn rope(&self, start: f64) -> TensorResult {
        let ((n, d), hd) = (matrix_extents(self.operands[0])?, self.positive_attr("head_dim")?);
        let [_, gh, gw] = self.extents_attr::<3>("grid")?;
        if !hd.is_multiple_of(2) || !d.is_multiple_of(hd) {
            return Err(format!("heads of {hd} do not divide rows of {d} into pairs"));
        }
        let stride = self.op.int_attr("frame_stride").unwrap_or(1);
        let spatial = 2 * (hd / 6);
        let widths = [hd - 2 * spatial, spatial, spatial];
        let mut y = self.operands[0].clone();
        for i in 0..n {
            let row = self.global_token(i)?;
            // With a frame stride of 0, all rows have the frame position `start` and no position in
            // the grid.
            let at = match stride {
                0 => [start, 0.0, 0.0],
                s => [start + s as f64 * (row / (gh * gw)) as f64, (row / gw % gh) as f64, (row % gw) as f64],
            };
            for head in 0..d / hd {
                let mut column = i * d + head * hd;
                for (position, width) in at.into_iter().zip(widths) {
                    for pair in 0..width / 2 {
                        let angle = position / 10000f64.powf(2.0 * pair as f64 / width as f64);
                        let (a, b) = (self.operands[0].data()[column], self.operands[0].data()[column + 1]);
                        y.data_mut()[column] = a * angle.cos() - b * angle.sin();
                        y.data_mut()[column + 1] = a * angle.sin() + b * angle.cos();
                        column += 2;
                    }
                }
            }
        }
        Ok(y)
    }

    fn attention(&self, bias: Option<f64>) -> TensorResult {
        let ((n, d), (r, dk)) = (matrix_extents(self.operands[0])?, matrix_extents(self.operands[1])?);
        let hd = self.positive_attr("head_dim")?;
        if d != dk || self.operands[2].shape() != [r, d] || !d.is_multiple_of(hd) {
            return Err(format!(
                "q {:?} k {:?} v {:?}",
                self.operands[0].shape(),
                self.operands[1].shape(),
                self.operands[2].shape()
            ));
        }
        let biased = match (bias, self.op.ints_attr("bias_rows")) {
            (Some(b), Some(&[from, to])) => Some((b, from, to)),
            (None, None) => None,
            _ => return Err("`bias` and `bias_rows` must be given together".to_string()),
        };
        let mut y = Tensor::full(&[n, d], 0.0);
        for i in 0..n {
            for h in (0..d).step_by(hd) {
                let q = &self.operands[0].row(i)[h..h + hd];
                let scores: Vec<f64> = (0..r)
                    .map(|j| {
                        let dot: f64 =
                            q.iter().zip(&self.operands[1].row(j)[h..h + hd]).map(|(a, b)| a * b).sum();
                        let extra = match biased {
                            Some((b, from, to)) if (from..to).contains(&(j as i64)) => b,
                            _ => 0.0,
                        };
                        dot / (hd as f64).sqrt() + extra
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                for c in h..h + hd {
                    let sum: f64 = (0..r).map(|j| weights[j] * self.operands[2].row(j)[c]).sum();
                    y.data_mut()[i * d + c] = sum / total;
                }
            }
        }
        Ok(y)
    }

    fn time_embed(&self) -> TensorResult {
        let ([f], width) = (self.operands[0].shape(), self.positive_attr("width")?) else {
            return Err(format!("timesteps have shape {:?}, expected [f]", self.operands[0].shape()));
        };
        let half = width / 2;
        Ok(Tensor::from_fn(&[*f, 2 * half], |i| {
            let (t, c) = (self.operands[0].data()[i / (2 * half)], i % (2 * half));
            let angle = t * 10000f64.powf(-((c % half) as f64) / half as f64);
            if c < half { angle.cos() } else { angle.sin() }
        }))
    }

    fn renoise(&self, sigma: f64, key: DrawKey) -> TensorResult {
        let shape = self.operands[0].shape().to_vec();
        Ok(Tensor::from_fn(&shape, |i| {
            // Convert the local index to coordinates and these to the global index.
            let (mut rest, mut global, mut step) = (i, 0, 1);
            for dim in (0..shape.len()).rev() {
                global += (rest % shape[dim] + self.position.start[dim]) * step;
                rest /= shape[dim];
                step *= self.position.global[dim];
            }
            let mut draw = [0.0f32];
            fill_normals(key, global as u64, &mut draw);
            (1.0 - sigma) * self.operands[0].data()[i] + sigma * f64::from(draw[0])
        }))
    }

    /// Maps pixel (t, y, x, colour) of [.., h, w, c] pixels to its (token, element). A token's
    /// elements run over (patch row, patch column, channel), and a channel is (frame, row, column,
    /// colour) inside one latent.
    fn token_of(&self, i: usize, [_, h, w, c]: [usize; 4]) -> Result<(usize, usize), String> {
        let ([st, sh, sw], [ph, pw]) = (self.extents_attr::<3>("stride")?, self.extents_attr::<2>("patch")?);
        let (t, y, x, colour) = (i / (h * w * c), i / (w * c) % h, i / c % w, i % c);
        let (ly, lx) = (y / sh, x / sw);
        let token = (t / st * (h / sh / ph) + ly / ph) * (w / sw / pw) + lx / pw;
        let channel = ((t % st * sh + y % sh) * sw + x % sw) * c + colour;
        Ok((token, ((ly % ph) * pw + lx % pw) * (st * sh * sw * c) + channel))
    }

    fn space_time_to_depth(&self) -> TensorResult {
        let [t, h, w, c] = self.operands[0].shape()[..] else {
            return Err(format!("pixels {:?}", self.operands[0].shape()));
        };
        let ([st, sh, sw], [ph, pw]) = (self.extents_attr::<3>("stride")?, self.extents_attr::<2>("patch")?);
        if !t.is_multiple_of(st) || !h.is_multiple_of(sh * ph) || !w.is_multiple_of(sw * pw) {
            return Err(format!(
                "pixels {:?} are not divisible into blocks of {st}, {}, {}",
                self.operands[0].shape(),
                sh * ph,
                sw * pw
            ));
        }
        let (tokens, width) = (t / st * (h / (sh * ph)) * (w / (sw * pw)), ph * pw * st * sh * sw * c);
        let mut y = Tensor::full(&[tokens, width], 0.0);
        for i in 0..self.operands[0].data().len() {
            let (token, element) = self.token_of(i, [t, h, w, c])?;
            y.data_mut()[token * width + element] = self.operands[0].data()[i];
        }
        Ok(y)
    }

    fn depth_to_space_time(&self) -> TensorResult {
        let (tokens, width) = matrix_extents(self.operands[0])?;
        let ([st, sh, sw], [ph, pw]) = (self.extents_attr::<3>("stride")?, self.extents_attr::<2>("patch")?);
        let [f, gh, gw] = self.extents_attr::<3>("grid")?;
        let block = ph * pw * st * sh * sw;
        if tokens != f * gh * gw || !width.is_multiple_of(block) {
            return Err(format!("tokens {:?} do not fill a grid {f}, {gh}, {gw}", self.operands[0].shape()));
        }
        let shape = [f * st, gh * ph * sh, gw * pw * sw, width / block];
        let mut y = Tensor::full(&shape, 0.0);
        for i in 0..y.data().len() {
            let (token, element) = self.token_of(i, shape)?;
            y.data_mut()[i] = self.operands[0].data()[token * width + element].clamp(-1.0, 1.0);
        }
        Ok(y)
    }

    fn pad_rows(&self) -> TensorResult {
        let (dim, rows) = (self.int_attr("dim")?, self.int_attr("rows")?);
        let mut shape = self.operands[0].shape().to_vec();
        let have = *shape.get(dim).ok_or_else(|| format!("no dim {dim} in {shape:?}"))?;
        let missing =
            rows.checked_sub(have).ok_or_else(|| format!("{have} rows exceed the padded size {rows}"))?;
        shape[dim] = missing;
        let pieces = [self.operands[0].clone(), Tensor::full(&shape, 0.0)];
        Tensor::concat(dim, &pieces).ok_or_else(|| format!("cannot pad {:?}", self.operands[0].shape()))
    }

    fn compact_rows(&self) -> TensorResult {
        let (extent, parts, unit) =
            (self.positive_attr("extent")?, self.positive_attr("parts")?, self.positive_attr("unit")?);
        let have = self.operands[0].shape().first().copied().unwrap_or(0);
        if !have.is_multiple_of(parts) || !extent.is_multiple_of(unit) {
            return Err(format!("{have} rows are not divisible into {parts} shards"));
        }
        let (units, each) = (extent / unit, have / parts);
        // Shards are as even as whole units permit, longer ones first.
        let pieces: Option<Vec<Tensor>> = (0..parts)
            .map(|i| {
                let len = (units / parts + usize::from(i < units % parts)) * unit;
                if len > each { None } else { self.operands[0].slice(0, i * each, len) }
            })
            .collect();
        pieces
            .and_then(|p| Tensor::concat(0, &p))
            .ok_or_else(|| format!("{have} rows do not hold {extent} in {parts} shards"))
    }
}
