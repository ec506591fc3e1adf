//! Reference semantics of the ops on frames [t, h, w, c] and on the patches of which tokens consist.

use tessera_ir::views;

use super::{OpContext, TensorResult, matrix_extents, vector_data};
use crate::Tensor;

pub(super) fn conv3d(cx: &OpContext<'_>, v: &views::Conv3d) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let [_, h, w, c] = frame_extents(x)?;
    let (m, k) = matrix_extents(cx.tensor(v.w)?)?;
    let [kt, kh, kw] = v.kernel.map(|n| n as usize);
    if k != kt * kh * kw * c {
        return Err(format!("rows of {k} for a kernel {kt}, {kh}, {kw} over {c} channels"));
    }
    let mut frames: Vec<&[f64]> = Vec::new();
    let zeros = vec![0.0; h * w * c];
    match v.history {
        Some(history) => frames.extend(frames_of(cx.tensor(history)?, h * w * c)?),
        None => frames.extend((0..v.pad_frames).map(|_| zeros.as_slice())),
    }
    frames.extend(frames_of(x, h * w * c)?);
    // The rows above and below each frame, where another member holds them.
    let halo = match v.halo {
        Some(halo) => Some(frames_of(cx.tensor(halo)?, 2 * w * c)?.collect::<Vec<_>>()),
        None => None,
    };
    let padded_frames = if v.history.is_some() { 0 } else { v.pad_frames as usize };
    let bias = v.bias.map(|b| vector_data(cx.tensor(b)?, m)).transpose()?;
    let (before, padding) = (v.pad_before as usize, (v.pad_before + v.pad_after) as usize);
    let [st, sh, sw] = v.stride.unwrap_or([1; 3]).map(|n| n as usize);
    let extent = |n: usize, kernel: usize, stride: usize| Some(n.checked_sub(kernel)? / stride + 1);
    let (Some(t2), Some(h2), Some(w2)) =
        (extent(frames.len(), kt, st), extent(h + padding, kh, sh), extent(w + padding, kw, sw))
    else {
        return Err(format!("a kernel {kt}, {kh}, {kw} does not fit frames {:?}", x.shape()));
    };
    let weight = cx.tensor(v.w)?;
    let scales = v.w_scale.map(|s| vector_data(cx.tensor(s)?, m)).transpose()?;
    Ok(Tensor::from_fn(&[t2, h2, w2, m], |i| {
        let (frame, row, column, channel) = (i / (h2 * w2 * m), i / (w2 * m) % h2, i / m % w2, i % m);
        let bias = bias.map_or(0.0, |b| b[channel]);
        let mut sum = if scales.is_some() { 0.0 } else { bias };
        for (tap, w_tap) in weight.row(channel).chunks_exact(c).enumerate() {
            let (dt, dy, dx) = (tap / (kh * kw), tap / kw % kh, tap % kw);
            // A tap outside of the frame and of its halo reads a zero.
            let (y, x) = ((row * sh + dy).wrapping_sub(before), (column * sw + dx).wrapping_sub(before));
            let at = frame * st + dt;
            let beside = || at.checked_sub(padded_frames).zip(halo.as_ref()).map(|(at, halo)| halo[at]);
            let line = match y {
                _ if y < h => Some(&frames[at][y * w * c..]),
                _ if y == h => beside().map(|rows| &rows[w * c..]),
                usize::MAX => beside(),
                _ => None,
            };
            if let Some(line) = line.filter(|_| x < w) {
                sum += line[x * c..][..c].iter().zip(w_tap).map(|(a, b)| a * b).sum::<f64>();
            }
        }
        scales.map_or(sum, |s| s[channel] * sum + bias)
    }))
}

pub(super) fn upsample_nearest(cx: &OpContext<'_>, v: &views::UpsampleNearest) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let [t, h, w, c] = frame_extents(x)?;
    let [sh, sw] = v.scale.map(|n| n as usize);
    let (h2, w2) = (h * sh, w * sw);
    Ok(Tensor::from_fn(&[t, h2, w2, c], |i| {
        let (frame, row, column) = (i / (h2 * w2 * c), i / (w2 * c) % h2, i / c % w2);
        x.data()[((frame * h + row / sh) * w + column / sw) * c + i % c]
    }))
}

pub(super) fn channels_to_frames(cx: &OpContext<'_>, v: &views::ChannelsToFrames) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let ([t, h, w, all], parts) = (frame_extents(x)?, v.parts as usize);
    if !all.is_multiple_of(parts) {
        return Err(format!("{parts} parts of {all} channels"));
    }
    let c = all / parts;
    Ok(Tensor::from_fn(&[t * parts, h, w, c], |i| {
        let (frame, cell) = (i / (h * w * c), i / c % (h * w));
        x.data()[(frame / parts * h * w + cell) * all + frame % parts * c + i % c]
    }))
}

pub(super) fn patchify(cx: &OpContext<'_>, v: &views::Patchify) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let ([t, h, w, c], [ph, pw]) = (frame_extents(x)?, v.patch.map(|n| n as usize));
    if !h.is_multiple_of(ph) || !w.is_multiple_of(pw) {
        return Err(format!("frames {:?} are not divisible into patches of {ph}, {pw}", x.shape()));
    }
    let width = ph * pw * c;
    Ok(Tensor::from_fn(&[t * (h / ph) * (w / pw), width], |i| {
        x.data()[grid_index(i / width, i % width, [h, w, c], [ph, pw])]
    }))
}

pub(super) fn unpatchify(cx: &OpContext<'_>, v: &views::Unpatchify) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let (tokens, width) = matrix_extents(x)?;
    let ([t, gh, gw], [ph, pw]) = (v.grid.map(|n| n as usize), v.patch.map(|n| n as usize));
    if tokens != t * gh * gw || !width.is_multiple_of(ph * pw) {
        return Err(format!("tokens {:?} do not fill a grid {t}, {gh}, {gw}", x.shape()));
    }
    let shape = [t, gh * ph, gw * pw, width / (ph * pw)];
    let mut y = Tensor::full(&shape, 0.0);
    for i in 0..tokens * width {
        let to = grid_index(i / width, i % width, [shape[1], shape[2], shape[3]], [ph, pw]);
        y.data_mut()[to] = x.data()[i];
    }
    Ok(y)
}

pub(super) fn scale_shift(cx: &OpContext<'_>, v: &views::ScaleShift) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let c = x.shape().last().copied().unwrap_or(1);
    let (scale, shift) = (vector_data(cx.tensor(v.scale)?, c)?, vector_data(cx.tensor(v.shift)?, c)?);
    Ok(Tensor::from_fn(x.shape(), |i| match v.inverse {
        true => (x.data()[i] - shift[i % c]) / scale[i % c],
        false => x.data()[i] * scale[i % c] + shift[i % c],
    }))
}

/// Returns the index in a grid of rows × columns × channels per frame of an element of a token.
fn grid_index(token: usize, element: usize, [h, w, c]: [usize; 3], [ph, pw]: [usize; 2]) -> usize {
    let (gh, gw) = (h / ph, w / pw);
    let (frame, patch_row, patch_column) = (token / (gh * gw), token / gw % gh, token % gw);
    let (row, column, channel) = (element / (pw * c), element / c % pw, element % c);
    ((frame * h + patch_row * ph + row) * w + patch_column * pw + column) * c + channel
}

fn frame_extents(x: &Tensor) -> Result<[usize; 4], String> {
    x.shape().try_into().map_err(|_| format!("{:?} are not frames [t, h, w, c]", x.shape()))
}

fn frames_of(x: &Tensor, elements: usize) -> Result<impl Iterator<Item = &[f64]>, String> {
    if x.data().len().is_multiple_of(elements) {
        return Ok(x.data().chunks_exact(elements));
    }
    Err(format!("{:?} is not a number of whole frames of {elements} elements", x.shape()))
}
