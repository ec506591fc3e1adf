//! Reference semantics of the ops that convert pixels to latent tokens and back.

use tessera_ir::views;

use super::{OpContext, TensorResult, matrix_extents};
use crate::Tensor;

pub(super) fn space_time_to_depth(cx: &OpContext<'_>, v: &views::SpaceTimeToDepth) -> TensorResult {
    let pixels = cx.tensor(v.x)?;
    let [t, h, w, c] = pixels.shape()[..] else {
        return Err(format!("pixels {:?}", pixels.shape()));
    };
    let layout = TokenLayout::new(v.stride, v.patch);
    let TokenLayout { stride: [st, sh, sw], patch: [ph, pw] } = layout;
    if !t.is_multiple_of(st) || !h.is_multiple_of(sh * ph) || !w.is_multiple_of(sw * pw) {
        return Err(format!(
            "pixels {:?} are not divisible into blocks of {st}, {}, {}",
            pixels.shape(),
            sh * ph,
            sw * pw
        ));
    }
    let (tokens, width) = (t / st * (h / (sh * ph)) * (w / (sw * pw)), ph * pw * st * sh * sw * c);
    let mut y = Tensor::full(&[tokens, width], 0.0);
    for i in 0..pixels.data().len() {
        let (token, element) = layout.token_of(i, [t, h, w, c]);
        y.data_mut()[token * width + element] = pixels.data()[i];
    }
    Ok(y)
}

pub(super) fn depth_to_space_time(cx: &OpContext<'_>, v: &views::DepthToSpaceTime) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let (tokens, width) = matrix_extents(x)?;
    let layout = TokenLayout::new(v.stride, v.patch);
    let TokenLayout { stride: [st, sh, sw], patch: [ph, pw] } = layout;
    let [f, gh, gw] = v.grid.map(|n| n as usize);
    let block = ph * pw * st * sh * sw;
    if tokens != f * gh * gw || !width.is_multiple_of(block) {
        return Err(format!("tokens {:?} do not fill a grid {f}, {gh}, {gw}", x.shape()));
    }
    let shape = [f * st, gh * ph * sh, gw * pw * sw, width / block];
    let mut y = Tensor::full(&shape, 0.0);
    for i in 0..y.data().len() {
        let (token, element) = layout.token_of(i, shape);
        y.data_mut()[i] = x.data()[token * width + element].clamp(-1.0, 1.0);
    }
    Ok(y)
}

/// How pixels are grouped into tokens: the extents of a latent in pixels (frames, rows, columns),
/// and of a token in latents (rows, columns).
#[derive(Clone, Copy)]
struct TokenLayout {
    stride: [usize; 3],
    patch: [usize; 2],
}

impl TokenLayout {
    fn new(stride: [u64; 3], patch: [u64; 2]) -> TokenLayout {
        TokenLayout { stride: stride.map(|n| n as usize), patch: patch.map(|n| n as usize) }
    }

    /// Maps pixel (t, y, x, colour) of [.., h, w, c] pixels to its (token, element). A token's
    /// elements run over (patch row, patch column, channel), and a channel is (frame, row, column,
    /// colour) inside one latent.
    fn token_of(self, i: usize, [_, h, w, c]: [usize; 4]) -> (usize, usize) {
        let TokenLayout { stride: [st, sh, sw], patch: [ph, pw] } = self;
        let (t, y, x, colour) = (i / (h * w * c), i / (w * c) % h, i / c % w, i % c);
        let (ly, lx) = (y / sh, x / sw);
        let token = (t / st * (h / sh / ph) + ly / ph) * (w / sw / pw) + lx / pw;
        let channel = ((t % st * sh + y % sh) * sw + x % sw) * c + colour;
        (token, ((ly % ph) * pw + lx % pw) * (st * sh * sw * c) + channel)
    }
}
