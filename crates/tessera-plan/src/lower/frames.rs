//! Lowers the phases of pixels over tp: each rank owns whole rows of latents, and their rows of every level
//! of the VAE. Convolutions read the neighbours' edge rows by a halo exchange, and attention within a
//! frame runs on whole frames, because it is a small part of the work.

use tessera_ir::{BufferId, Op, OpView, Opcode, Program, StreamKind, Type, ValueId, views};
use tessera_mesh::{Axis, AxisLayout, Shard};

use super::Lowering;

/// Part of the name of a buffer that collects whole frames of an attention.
const WHOLE_FRAMES: &str = ".frames";

/// Returns the rows of latents in a phase of pixels, of which every level has a multiple.
pub(super) fn latent_rows(p: &Program) -> Option<u64> {
    let grid = |op: &Op| match op.opcode {
        Opcode::Unpatchify => op.results.first().copied(),
        Opcode::Patchify => op.operands.first().copied(),
        _ => None,
    };
    p.ops.iter().find_map(grid).and_then(|v| p.type_of(v).shape.get(1).copied())
}

impl Lowering<'_> {
    /// Returns the layout over tp of frames [t, h, w, c] with these extents.
    pub(super) fn frame_layout(&self, shape: &[u64]) -> AxisLayout {
        let (Some(rows), [_, h, _, _]) = (self.latent_rows, shape) else { return AxisLayout::Replicated };
        if self.sharding.tp == 1 || !h.is_multiple_of(rows) {
            return AxisLayout::Replicated;
        }
        // With fewer rows of latents than ranks, every rank computes whole frames.
        Shard::new(1, *h, h / rows, self.sharding.tp).map_or(AxisLayout::Replicated, AxisLayout::Shard)
    }

    /// Returns the layout over tp of a buffer of a VAE.
    pub(super) fn frame_buffer_layout(&self, name: &str, shape: &[u64]) -> AxisLayout {
        if name.contains(WHOLE_FRAMES) { AxisLayout::Replicated } else { self.frame_layout(shape) }
    }

    /// Reshards frames to the shards of their rows.
    fn shard_frames(&mut self, x: ValueId, logical: ValueId, s: usize) -> ValueId {
        let shape = self.program.type_of(logical).shape.clone();
        let want = self.frame_layout(&shape);
        let unit = self.latent_rows.map_or(1, |rows| shape.get(1).map_or(1, |h| h / rows));
        self.reshard(x, want, s, unit)
    }

    /// Lowers an op of a phase of pixels. Returns `false` for an op that needs no rule of its own.
    pub(super) fn lower_frame_op(&mut self, op: &Op, s: usize) -> bool {
        match (op.opcode, op.view()) {
            (Opcode::Conv3d, Ok(OpView::Conv3d(v))) => self.lower_conv3d(op, &v, s),
            (Opcode::Unpatchify, _) => {
                let x = self.local_value(op.operands[0], s);
                let b = &mut self.stages[s].builder;
                let y = b.copy_attrs(op, &["grid", "patch"]).add_op(Opcode::Unpatchify, &[x]);
                let y = self.shard_frames(y, op.results[0], s);
                self.set_result(op, s, y);
            }
            (Opcode::Patchify, _) => {
                let x = self.local_value(op.operands[0], s);
                let x = self.reshard(x, AxisLayout::Replicated, s, 1);
                let y = self.stages[s].builder.copy_attrs(op, &["patch"]).add_op(Opcode::Patchify, &[x]);
                self.set_result(op, s, y);
            }
            _ => return false,
        }
        true
    }

    fn lower_conv3d(&mut self, op: &Op, v: &views::Conv3d, s: usize) {
        let x = self.local_value(v.x, s);
        let x = match self.feeds_attention(op.results[0]) {
            true => self.reshard(x, AxisLayout::Replicated, s, 1),
            false => self.shard_frames(x, v.x, s),
        };
        let w = self.local_value(v.w, s);
        let keyed = [("bias", v.bias), ("history", v.history), ("w_scale", v.w_scale)];
        let mut keyed: Vec<(&str, ValueId)> = keyed
            .into_iter()
            .filter_map(|(key, value)| Some((key, value?)))
            .map(|(key, value)| (key, self.local_value(value, s)))
            .collect();
        if v.kernel[1] > 1 && matches!(self.tp_layout(x, s), AxisLayout::Shard(_)) {
            let halo = self.exchange_halo(x, v, s);
            keyed.push(("halo", halo));
        }
        let b = &mut self.stages[s].builder;
        b.copy_attrs(op, &["kernel", "pad_after", "pad_before", "pad_frames", "stride"]);
        for (key, value) in keyed {
            b.add_keyed(key, value);
        }
        let y = b.add_op(Opcode::Conv3d, &[x, w]);
        self.set_result(op, s, y);
    }

    /// Exchanges the halo of the frames of x. The halo of the history is a history of its own, so that no
    /// frame is exchanged twice; both are collected in a buffer, whose view the convolution reads.
    fn exchange_halo(&mut self, x: ValueId, v: &views::Conv3d, s: usize) -> ValueId {
        let no_attrs: [(&'static str, u64); 0] = [];
        let (stream, axis) = (StreamKind::TpCollective, Axis::Tp);
        let ticket = self.issue_collective(s, Opcode::HaloExchange, x, no_attrs, stream, axis);
        let halo = self.wait_for(s, ticket, None);
        let Some(history) = v.history else { return halo };
        let read = self.analysis.defs[history.0 as usize].map(|d| &self.program.ops[d]);
        let Some(name) = read.and_then(|op| op.buffer).map(|b| self.program.buffer(b).name.clone()) else {
            return halo;
        };
        let kept = self.program.type_of(history).shape[0];
        let ty = self.stages[s].builder.type_of(halo).clone();
        let frames = ty.shape[0];
        let past = self.halo_buffer(&format!("{name}.halo"), kept, &ty, s);
        let all = self.halo_buffer(&format!("{name}.halo{frames}"), kept + frames, &ty, s);
        let b = &mut self.stages[s].builder;
        let old = b.read_buffer(past);
        b.write_buffer(all, old);
        b.set_attr("first_row", kept);
        b.write_buffer(all, halo);
        let view = b.read_buffer(all);
        b.set_attr("row", frames).set_attr("rows", kept);
        let newest = b.add_op(Opcode::TakeRows, &[view]);
        b.write_buffer(past, newest);
        view
    }

    fn halo_buffer(&mut self, name: &str, frames: u64, halo: &Type, s: usize) -> BufferId {
        let mut ty = halo.clone();
        ty.shape[0] = frames;
        self.stages[s].builder.declare_buffer(name, ty)
    }

    /// Returns whether an attention reads a value after movements of its elements alone.
    fn feeds_attention(&self, v: ValueId) -> bool {
        self.analysis.readers[v.0 as usize].iter().map(|i| &self.program.ops[*i]).any(|op| match op.opcode {
            Opcode::Attention => true,
            Opcode::ChannelsToFrames | Opcode::TakeRows => {
                op.results.first().is_some_and(|r| self.feeds_attention(*r))
            }
            _ => false,
        })
    }

    /// Reshards the frames among several operands to the shards of their rows, because an attention has
    /// made some of them whole.
    pub(super) fn align_frames(&mut self, operands: &mut [ValueId], op: &Op, s: usize) {
        for (x, logical) in operands.iter_mut().zip(&op.operands) {
            if op.operands.len() > 1 && self.program.type_of(*logical).shape.len() == 4 {
                *x = self.shard_frames(*x, *logical, s);
            }
        }
    }
}
