//! What the ops of one rank compute, written out element by element.

use tessera_base::random::{DrawKey, normals};
use tessera_ir::{DType, Op, Opcode, Type};
use tessera_mesh::{Coord, Mesh};

use crate::round::rounding;
use crate::{Tensor, tile};

/// Where an operand lies in the global tensor: the start of each dim here, and the global extents.
#[derive(Debug, Default)]
pub(crate) struct Place {
    start: Vec<usize>,
    global: Vec<usize>,
}

impl Place {
    /// The place of a value of this type at a coordinate.
    pub(crate) fn of(ty: &Type, mesh: &Mesh, coord: Coord) -> Place {
        let ranges = ty.layout.ranges(&ty.shape, mesh, coord);
        Place {
            start: ranges.iter().map(|(s, _)| *s as usize).collect(),
            global: ty.layout.global(&ty.shape, mesh).iter().map(|n| *n as usize).collect(),
        }
    }

    /// Number of local row `i` in the value that the op is given.
    fn row(&self, i: usize) -> usize {
        self.start.first().copied().unwrap_or(0) + i
    }
}

type Meaning = Result<Tensor, String>;

/// Rows of (ph, pw, C) of a patch convolution [d, C, 1, ph, pw].
pub(crate) fn patch_rows(w: &Tensor) -> Meaning {
    let [d, c, 1, ph, pw] = w.shape()[..] else {
        return Err(format!("a patch convolution of shape {:?}", w.shape()));
    };
    let width = ph * pw * c;
    Ok(Tensor::from_fn(&[d, width], |i| {
        let (row, rest) = (i / width, i % width);
        let (p, q, channel) = (rest / (pw * c), rest / c % pw, rest % c);
        w.data()[((row * c + channel) * ph + p) * pw + q]
    }))
}

/// Rows in e4m3, and the scale of each.
pub(crate) fn quantized(x: &Tensor) -> Result<(Tensor, Tensor), String> {
    let (n, k) = matrix(x)?;
    let (Some(f32), Some(e4m3)) = (rounding(DType::F32), rounding(DType::E4m3)) else {
        return Err("no rounding".to_string());
    };
    let scale = |i: usize| match x.row(i).iter().fold(0.0, |most: f64, x| most.max(x.abs())) {
        0.0 => 1.0,
        most => f32.nearest(most / 448.0),
    };
    let scales = Tensor::from_fn(&[n], scale);
    let rows = Tensor::from_fn(&[n, k], |i| e4m3.nearest(f32.nearest(x.data()[i] / scales.data()[i / k])));
    Ok((rows, scales))
}

/// The result of a compute op.
pub(crate) fn evaluate<'a>(
    op: &Op,
    x: &[&Tensor],
    float: &dyn Fn(&str) -> Option<&'a Tensor>,
    int: &dyn Fn(&str) -> Option<i64>,
    place: &Place,
) -> Meaning {
    let cx = Cx { op, x, place };
    let scalar = |name: &str| match float(name).map(Tensor::data) {
        Some([v]) => Ok(*v),
        _ => Err(format!("`{name}` is no number")),
    };
    let whole = |name: &str| int(name).ok_or_else(|| format!("`{name}` is no whole number"));
    let need = if matches!(op.opcode, Opcode::GateResidual | Opcode::RowSquareSum) {
        1
    } else {
        op.opcode.row().operands.0
    };
    if x.len() < need {
        return Err(format!("{} operands", x.len()));
    }
    match op.opcode {
        Opcode::Matmul => cx.matmul(float("bias"), [float("x_scale"), float("w_scale")]),
        Opcode::BiasAct => cx.bias_act(x[0], Some(x[1])),
        Opcode::Add => zip(x[0], x[1], |a, b| a + b),
        Opcode::Silu => Ok(map(x[0], silu)),
        Opcode::Cast => {
            let round = op.str("to").and_then(DType::parse).and_then(rounding);
            let round = round.ok_or_else(|| "`to` names no dtype to round to".to_string())?;
            Ok(map(x[0], |x| round.nearest(x)))
        }
        Opcode::LayerNorm => cx.layer_norm(),
        Opcode::Modulation => cx.modulation(),
        Opcode::NormModulate => cx.norm_modulate(),
        Opcode::GateResidual => cx.gate_residual(),
        Opcode::RmsNorm => cx.rms_norm(),
        Opcode::RowSquareSum => cx.row_square_sum(),
        Opcode::RmsScale => cx.rms_scale(),
        Opcode::Rope => cx.rope(whole("start")? as f64),
        Opcode::Attention => cx.attention(float("bias").map(|_| scalar("bias")).transpose()?),
        Opcode::Softmax => tile::softmax(op, x[0]),
        Opcode::Dot => tile::dot(op, x[0], x[1]),
        Opcode::TimeEmbed => cx.time_embed(),
        Opcode::Renoise => {
            let small =
                |name: &str| u32::try_from(whole(name)?).map_err(|_| format!("`{name}` beyond 32 bits"));
            let key = DrawKey { seed: whole("seed")? as u64, chunk: small("chunk")?, draw: small("draw")? };
            cx.renoise(scalar("sigma")?, key)
        }
        Opcode::ToX0 => {
            let sigma = scalar("sigma")?;
            zip(x[0], x[1], |x, flow| x - sigma * flow)
        }
        Opcode::SpaceTimeToDepth => cx.to_depth(),
        Opcode::DepthToSpaceTime => cx.to_pixels(),
        Opcode::TakeRows => {
            let (row, rows) = (cx.natural("row")?, cx.natural("rows")?);
            x[0].slice(0, row, rows).ok_or_else(|| format!("{rows} rows from {row} of {:?}", x[0].shape()))
        }
        Opcode::Pad => cx.pad(),
        Opcode::Compact => cx.compact(),
        other => Err(format!("{} has no meaning on one rank", other.name())),
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

fn map(x: &Tensor, f: impl Fn(f64) -> f64) -> Tensor {
    Tensor::from_fn(x.shape(), |i| f(x.data()[i]))
}

fn zip(a: &Tensor, b: &Tensor, f: impl Fn(f64, f64) -> f64) -> Meaning {
    if a.shape() != b.shape() {
        return Err(format!("{:?} and {:?} differ", a.shape(), b.shape()));
    }
    Ok(Tensor::from_fn(a.shape(), |i| f(a.data()[i], b.data()[i])))
}

fn matrix(t: &Tensor) -> Result<(usize, usize), String> {
    match t.shape()[..] {
        [n, d] => Ok((n, d)),
        _ => Err(format!("{:?} is no matrix", t.shape())),
    }
}

fn vector(t: &Tensor, d: usize) -> Result<&[f64], String> {
    if t.shape() == [d] { Ok(t.data()) } else { Err(format!("{:?} for rows of {d}", t.shape())) }
}

/// Mean, and one over the standard deviation.
fn moments(row: &[f64], eps: f64) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = row.iter().sum::<f64>() / n;
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (variance + eps).sqrt())
}

struct Cx<'a> {
    op: &'a Op,
    x: &'a [&'a Tensor],
    place: &'a Place,
}

impl Cx<'_> {
    fn natural(&self, name: &str) -> Result<usize, String> {
        let found = self.op.int(name).and_then(|i| usize::try_from(i).ok());
        found.ok_or_else(|| format!("`{name}` is missing or negative"))
    }

    fn positive(&self, name: &str) -> Result<usize, String> {
        match self.natural(name)? {
            0 => Err(format!("`{name}` is 0")),
            n => Ok(n),
        }
    }

    /// Number of local row `i` in the whole of which the op's value may be a piece.
    fn token(&self, i: usize) -> Result<usize, String> {
        let first = if self.op.attrs.contains_key("first") { self.natural("first")? } else { 0 };
        Ok(first + self.place.row(i))
    }

    fn eps(&self) -> Result<f64, String> {
        self.op.float("eps").ok_or_else(|| "`eps` is missing".to_string())
    }

    fn extents<const N: usize>(&self, name: &str) -> Result<[usize; N], String> {
        let v: Vec<usize> = self
            .op
            .ints(name)
            .unwrap_or(&[])
            .iter()
            .filter_map(|i| usize::try_from(*i).ok())
            .filter(|i| *i > 0)
            .collect();
        v.try_into().map_err(|_| format!("`{name}` must be {N} whole numbers"))
    }

    fn act(&self, y: f64) -> Result<f64, String> {
        match self.op.str("act") {
            None => Ok(y),
            Some("silu") => Ok(silu(y)),
            Some("gelu_tanh") => Ok(gelu_tanh(y)),
            Some(other) => Err(format!("act = \"{other}\" has no meaning")),
        }
    }

    fn matmul(&self, bias: Option<&Tensor>, [x_scale, w_scale]: [Option<&Tensor>; 2]) -> Meaning {
        let ((n, k), (m, k2)) = (matrix(self.x[0])?, matrix(self.x[1])?);
        if k != k2 {
            return Err(format!("inner extents {k} and {k2}"));
        }
        let scale = |of: Option<&Tensor>, rows| match of {
            Some(s) => vector(s, rows).map(<[f64]>::to_vec),
            None => Ok(vec![1.0; rows]),
        };
        let (xs, ws) = (scale(x_scale, n)?, scale(w_scale, m)?);
        let y = Tensor::from_fn(&[n, m], |i| {
            let sum: f64 = self.x[0].row(i / m).iter().zip(self.x[1].row(i % m)).map(|(a, b)| a * b).sum();
            sum * xs[i / m] * ws[i % m]
        });
        self.bias_act(&y, bias)
    }

    fn bias_act(&self, x: &Tensor, bias: Option<&Tensor>) -> Meaning {
        let (_, m) = matrix(x)?;
        let mut y = x.clone();
        if let Some(b) = bias {
            let b = vector(b, m)?;
            y.data_mut().iter_mut().enumerate().for_each(|(i, y)| *y += b[i % m]);
        }
        for v in y.data_mut() {
            *v = self.act(*v)?;
        }
        Ok(y)
    }

    fn layer_norm(&self) -> Meaning {
        let ((_, d), eps) = (matrix(self.x[0])?, self.eps()?);
        let (w, b) = (vector(self.x[1], d)?, vector(self.x[2], d)?);
        Ok(Tensor::from_fn(self.x[0].shape(), |i| {
            let row = self.x[0].row(i / d);
            let (mean, scale) = moments(row, eps);
            (row[i % d] - mean) * scale * w[i % d] + b[i % d]
        }))
    }

    fn modulation(&self) -> Meaning {
        let [1, c, d] = self.x[0].shape()[..] else { return Err(format!("a table {:?}", self.x[0].shape())) };
        let (f, width) = matrix(self.x[1])?;
        if width != c * d && width != d {
            return Err(format!("a table {:?} with columns {width}", self.x[0].shape()));
        }
        Ok(Tensor::from_fn(&[f, c * d], |i| {
            let column = i % (c * d);
            self.x[0].data()[column] + self.x[1].row(i / (c * d))[column % width]
        }))
    }

    /// Column block `block` of the frame that local row `i` belongs to.
    fn columns<'t>(&self, m: &'t Tensor, i: usize, d: usize, block: usize) -> Result<&'t [f64], String> {
        let (frames, width) = matrix(m)?;
        let frame = self.token(i)? / self.positive("frame_rows")?;
        if frame >= frames || (block + 1) * d > width {
            return Err(format!("frame {frame}, columns {block} of {:?}", m.shape()));
        }
        Ok(&m.row(frame)[block * d..(block + 1) * d])
    }

    fn norm_modulate(&self) -> Meaning {
        let ((n, d), eps) = (matrix(self.x[0])?, self.eps()?);
        let (scale, shift) = (self.natural("scale")?, self.natural("shift")?);
        let mut y = self.x[0].clone();
        for i in 0..n {
            let (mean, norm) = moments(self.x[0].row(i), eps);
            let (scale, shift) =
                (self.columns(self.x[1], i, d, scale)?, self.columns(self.x[1], i, d, shift)?);
            for (j, v) in y.data_mut()[i * d..(i + 1) * d].iter_mut().enumerate() {
                *v = (*v - mean) * norm * (1.0 + scale[j]) + shift[j];
            }
        }
        Ok(y)
    }

    fn gate_residual(&self) -> Meaning {
        let sum = zip(self.x[0], self.x[1], |a, b| a + b)?;
        let Some(m) = self.x.get(2) else { return Ok(sum) };
        let ((n, d), gate) = (matrix(self.x[0])?, self.natural("gate")?);
        let mut y = self.x[0].clone();
        for i in 0..n {
            let gate = self.columns(m, i, d, gate)?;
            for (j, v) in y.data_mut()[i * d..(i + 1) * d].iter_mut().enumerate() {
                *v += self.x[1].row(i)[j] * gate[j];
            }
        }
        Ok(y)
    }

    fn rms_norm(&self) -> Meaning {
        let ((_, d), eps) = (matrix(self.x[0])?, self.eps()?);
        let w = vector(self.x[1], d)?;
        Ok(Tensor::from_fn(self.x[0].shape(), |i| {
            let row = self.x[0].row(i / d);
            let mean = row.iter().map(|x| x * x).sum::<f64>() / d as f64;
            row[i % d] / (mean + eps).sqrt() * w[i % d]
        }))
    }

    fn row_square_sum(&self) -> Meaning {
        let ((n, _), c) = (matrix(self.x[0])?, self.x.len());
        if self.x.iter().any(|x| matrix(x).map(|(rows, _)| rows) != Ok(n)) {
            return Err("operands of different heights".to_string());
        }
        Ok(Tensor::from_fn(&[n, c], |i| self.x[i % c].row(i / c).iter().map(|x| x * x).sum()))
    }

    fn rms_scale(&self) -> Meaning {
        let ((n, d), (n2, cols)) = (matrix(self.x[0])?, matrix(self.x[1])?);
        let (col, width, eps) = (self.natural("col")?, self.positive("width")?, self.eps()?);
        if n != n2 || col >= cols {
            return Err(format!("sums {:?}, column {col}, for {n} rows", self.x[1].shape()));
        }
        let w = vector(self.x[2], d)?;
        Ok(Tensor::from_fn(&[n, d], |i| {
            let mean = self.x[1].row(i / d)[col] / width as f64;
            self.x[0].data()[i] / (mean + eps).sqrt() * w[i % d]
        }))
    }

    fn rope(&self, start: f64) -> Meaning {
        let ((n, d), hd) = (matrix(self.x[0])?, self.positive("head_dim")?);
        let [_, gh, gw] = self.extents::<3>("grid")?;
        if !hd.is_multiple_of(2) || !d.is_multiple_of(hd) {
            return Err(format!("heads of {hd} in rows of {d}"));
        }
        let stride = self.op.int("frame_stride").unwrap_or(1);
        let spatial = 2 * (hd / 6);
        let widths = [hd - 2 * spatial, spatial, spatial];
        let mut y = self.x[0].clone();
        for i in 0..n {
            let row = self.token(i)?;
            // Rows that turn by frames alone have no place in the grid.
            let at = match stride {
                0 => [start, 0.0, 0.0],
                s => [start + s as f64 * (row / (gh * gw)) as f64, (row / gw % gh) as f64, (row % gw) as f64],
            };
            for head in 0..d / hd {
                let mut column = i * d + head * hd;
                for (position, width) in at.into_iter().zip(widths) {
                    for pair in 0..width / 2 {
                        let angle = position / 10000f64.powf(2.0 * pair as f64 / width as f64);
                        let (a, b) = (self.x[0].data()[column], self.x[0].data()[column + 1]);
                        y.data_mut()[column] = a * angle.cos() - b * angle.sin();
                        y.data_mut()[column + 1] = a * angle.sin() + b * angle.cos();
                        column += 2;
                    }
                }
            }
        }
        Ok(y)
    }

    fn attention(&self, bias: Option<f64>) -> Meaning {
        let ((n, d), (r, dk)) = (matrix(self.x[0])?, matrix(self.x[1])?);
        let hd = self.positive("head_dim")?;
        if d != dk || self.x[2].shape() != [r, d] || !d.is_multiple_of(hd) {
            return Err(format!(
                "q {:?} k {:?} v {:?}",
                self.x[0].shape(),
                self.x[1].shape(),
                self.x[2].shape()
            ));
        }
        let biased = match (bias, self.op.ints("bias_rows")) {
            (Some(b), Some(&[from, to])) => Some((b, from, to)),
            (None, None) => None,
            _ => return Err("a bias needs `bias_rows` and the other way round".to_string()),
        };
        let mut y = Tensor::full(&[n, d], 0.0);
        for i in 0..n {
            for h in (0..d).step_by(hd) {
                let q = &self.x[0].row(i)[h..h + hd];
                let scores: Vec<f64> = (0..r)
                    .map(|j| {
                        let dot: f64 = q.iter().zip(&self.x[1].row(j)[h..h + hd]).map(|(a, b)| a * b).sum();
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
                    let sum: f64 = (0..r).map(|j| weights[j] * self.x[2].row(j)[c]).sum();
                    y.data_mut()[i * d + c] = sum / total;
                }
            }
        }
        Ok(y)
    }

    fn time_embed(&self) -> Meaning {
        let ([f], width) = (self.x[0].shape(), self.positive("width")?) else {
            return Err(format!("timesteps {:?}", self.x[0].shape()));
        };
        let half = width / 2;
        Ok(Tensor::from_fn(&[*f, 2 * half], |i| {
            let (t, c) = (self.x[0].data()[i / (2 * half)], i % (2 * half));
            let angle = t * 10000f64.powf(-((c % half) as f64) / half as f64);
            if c < half { angle.cos() } else { angle.sin() }
        }))
    }

    fn renoise(&self, sigma: f64, key: DrawKey) -> Meaning {
        let shape = self.x[0].shape().to_vec();
        Ok(Tensor::from_fn(&shape, |i| {
            // From the local position to the coordinates to the global position.
            let (mut rest, mut global, mut step) = (i, 0, 1);
            for dim in (0..shape.len()).rev() {
                global += (rest % shape[dim] + self.place.start[dim]) * step;
                rest /= shape[dim];
                step *= self.place.global[dim];
            }
            let mut draw = [0.0f32];
            normals(key, global as u64, &mut draw);
            (1.0 - sigma) * self.x[0].data()[i] + sigma * f64::from(draw[0])
        }))
    }

    /// Where pixel (t, y, x, colour) of [.., h, w, c] pixels lies in the tokens: (token, element of it). A
    /// token's elements run over (patch row, patch column, channel), a channel being (frame, row, column,
    /// colour) inside one latent.
    fn token_of(&self, i: usize, [_, h, w, c]: [usize; 4]) -> Result<(usize, usize), String> {
        let ([st, sh, sw], [ph, pw]) = (self.extents::<3>("stride")?, self.extents::<2>("patch")?);
        let (t, y, x, colour) = (i / (h * w * c), i / (w * c) % h, i / c % w, i % c);
        let (ly, lx) = (y / sh, x / sw);
        let token = (t / st * (h / sh / ph) + ly / ph) * (w / sw / pw) + lx / pw;
        let channel = ((t % st * sh + y % sh) * sw + x % sw) * c + colour;
        Ok((token, ((ly % ph) * pw + lx % pw) * (st * sh * sw * c) + channel))
    }

    fn to_depth(&self) -> Meaning {
        let [t, h, w, c] = self.x[0].shape()[..] else {
            return Err(format!("pixels {:?}", self.x[0].shape()));
        };
        let ([st, sh, sw], [ph, pw]) = (self.extents::<3>("stride")?, self.extents::<2>("patch")?);
        if !t.is_multiple_of(st) || !h.is_multiple_of(sh * ph) || !w.is_multiple_of(sw * pw) {
            return Err(format!(
                "pixels {:?} in blocks of {st}, {}, {}",
                self.x[0].shape(),
                sh * ph,
                sw * pw
            ));
        }
        let (tokens, width) = (t / st * (h / (sh * ph)) * (w / (sw * pw)), ph * pw * st * sh * sw * c);
        let mut y = Tensor::full(&[tokens, width], 0.0);
        for i in 0..self.x[0].data().len() {
            let (token, element) = self.token_of(i, [t, h, w, c])?;
            y.data_mut()[token * width + element] = self.x[0].data()[i];
        }
        Ok(y)
    }

    fn to_pixels(&self) -> Meaning {
        let (tokens, width) = matrix(self.x[0])?;
        let ([st, sh, sw], [ph, pw]) = (self.extents::<3>("stride")?, self.extents::<2>("patch")?);
        let [f, gh, gw] = self.extents::<3>("grid")?;
        let block = ph * pw * st * sh * sw;
        if tokens != f * gh * gw || !width.is_multiple_of(block) {
            return Err(format!("tokens {:?} on a grid {f}, {gh}, {gw}", self.x[0].shape()));
        }
        let shape = [f * st, gh * ph * sh, gw * pw * sw, width / block];
        let mut y = Tensor::full(&shape, 0.0);
        for i in 0..y.data().len() {
            let (token, element) = self.token_of(i, shape)?;
            y.data_mut()[i] = self.x[0].data()[token * width + element].clamp(-1.0, 1.0);
        }
        Ok(y)
    }

    fn pad(&self) -> Meaning {
        let (dim, rows) = (self.natural("dim")?, self.natural("rows")?);
        let mut shape = self.x[0].shape().to_vec();
        let have = *shape.get(dim).ok_or_else(|| format!("no dim {dim} in {shape:?}"))?;
        let missing = rows.checked_sub(have).ok_or_else(|| format!("{have} rows are more than {rows}"))?;
        shape[dim] = missing;
        let pieces = [self.x[0].clone(), Tensor::full(&shape, 0.0)];
        Tensor::concat(dim, &pieces).ok_or_else(|| format!("{:?}", self.x[0].shape()))
    }

    fn compact(&self) -> Meaning {
        let (extent, parts, unit) =
            (self.positive("extent")?, self.positive("parts")?, self.positive("unit")?);
        let have = self.x[0].shape().first().copied().unwrap_or(0);
        if !have.is_multiple_of(parts) || !extent.is_multiple_of(unit) {
            return Err(format!("{have} rows as {parts} pieces"));
        }
        let (units, each) = (extent / unit, have / parts);
        // Pieces are as even as whole units allow, longer ones first.
        let pieces: Option<Vec<Tensor>> = (0..parts)
            .map(|i| {
                let len = (units / parts + usize::from(i < units % parts)) * unit;
                if len > each { None } else { self.x[0].slice(0, i * each, len) }
            })
            .collect();
        pieces
            .and_then(|p| Tensor::concat(0, &p))
            .ok_or_else(|| format!("{have} rows for {extent} in {parts} pieces"))
    }
}
