//! Rules of the ops on frames: values [t, h, w, c], channels last, and the patches of which a generator's
//! tokens consist.

use tessera_mesh::{Axis, AxisLayout, Layout, Shard, Uneven};

use super::resharding::{HALO_ROWS, halo_layout};
use super::{RuleContext, RuleResult, multiply_extents, rule_error};
use crate::codes::{T0203, T0210, T0213, T0214};
use crate::{DType, Type, views};

impl RuleContext<'_> {
    pub(super) fn conv3d_type(&self, v: &views::Conv3d) -> RuleResult<Type> {
        let [frames, rows, columns, c] = self.frame_shape(0)?;
        let [m, k] = self.matrix_shape(1)?;
        self.check_replicated(1)?;
        self.check_same_dtype(0, 1)?;
        if k != multiply_extents(&[multiply_extents(&v.kernel)?, c])? {
            let message = format!(
                "a kernel of {:?} over {} needs rows of kt·kh·kw·c elements, not {}",
                v.kernel,
                self.display_operand(0),
                self.display_operand(1)
            );
            return rule_error(&T0210, message);
        }
        let result = self.convolution_dtype(v, m)?;
        if let Some(b) = v.bias.map(|b| self.program.type_of(b))
            && (b.shape != [m] || b.dtype != result || !b.layout.is_replicated())
        {
            let message = format!("bias {} for {m} channels", b.display_on(self.mesh));
            return rule_error(&T0210, message);
        }
        let before = self.frames_before(v)?;
        let padding = v.pad_before.saturating_add(v.pad_after);
        let padded =
            [before.saturating_add(frames), rows.saturating_add(padding), columns.saturating_add(padding)];
        let stride = v.stride.unwrap_or([1; 3]);
        let mut shape = vec![0; 3];
        for (out, ((extent, kernel), stride)) in
            shape.iter_mut().zip(padded.into_iter().zip(v.kernel).zip(stride))
        {
            let Some(last) = extent.checked_sub(kernel) else {
                let message = format!(
                    "a kernel of {:?} does not fit {padded:?} frames, rows or columns of {}",
                    v.kernel,
                    self.display_operand(0)
                );
                return rule_error(&T0210, message);
            };
            *out = last / stride + 1;
        }
        shape.push(m);
        multiply_extents(&shape)?;
        self.check_halo(v, before.saturating_add(frames))?;
        let layout = match self.sharded_rows()? {
            None => Layout::REPLICATED,
            Some((axis, rows)) => {
                // Every member begins at a row that the step of the kernel reaches, and ends before one.
                let own = self.operands[0].shape[1];
                let steps_fit = own.is_multiple_of(stride[1])
                    && rows.uneven.is_none_or(|u| u.unit.is_multiple_of(stride[1]));
                if shape[1] != own / stride[1] || !steps_fit {
                    let message = format!(
                        "a kernel of {:?} with steps of {stride:?} and {padding} rows of padding over sharded rows of {}",
                        v.kernel,
                        self.display_operand(0)
                    );
                    return rule_error(&T0214, message);
                }
                scaled_rows(axis, rows, |n| n / stride[1])
            }
        };
        Ok(Type { dtype: result, shape, layout })
    }

    /// Returns the result dtype of a convolution to `m` channels. In e4m3 it needs a scale per channel of the
    /// result; in other dtypes it takes none. The values of x have the scale 1, because no scale of a row
    /// would be that of all cells that a tap reads.
    fn convolution_dtype(&self, v: &views::Conv3d, m: u64) -> RuleResult<DType> {
        let dtype = self.operands[0].dtype;
        match v.w_scale.map(|s| self.program.type_of(s)) {
            None if dtype != DType::E4m3 => Ok(dtype),
            Some(s) if dtype == DType::E4m3 => {
                if s.dtype != DType::F32 || s.shape != [m] || !s.layout.is_replicated() {
                    let message = format!("scales {} for {m} channels", s.display_on(self.mesh));
                    return rule_error(&T0210, message);
                }
                Ok(DType::Bf16)
            }
            None => rule_error(&T0210, "a convolution in e4m3 needs w_scale"),
            Some(_) => {
                let message =
                    format!("operands in {dtype} cannot have scales: only a convolution in e4m3 takes them");
                rule_error(&T0210, message)
            }
        }
    }

    /// Checks that a kernel over several sharded rows has the rows beside the shard, and that there is no
    /// halo otherwise.
    fn check_halo(&self, v: &views::Conv3d, frames: u64) -> RuleResult<()> {
        let shown = || self.display_operand(0);
        let rows = self.sharded_rows()?;
        let Some(halo) = v.halo.map(|h| self.program.type_of(h)) else {
            return match rows {
                Some((axis, _)) if v.kernel[1] > 1 => {
                    let message = format!(
                        "a kernel of {:?} over rows of {}, sharded over {axis}, without their halo",
                        v.kernel,
                        shown()
                    );
                    rule_error(&T0213, message)
                }
                _ => Ok(()),
            };
        };
        let [_, _, w, c] = self.frame_shape(0)?;
        let Some((axis, rows)) = rows else {
            return rule_error(&T0213, format!("a halo of {}, whose rows no axis shards", shown()));
        };
        let layout = Layout::REPLICATED.with_axis(axis, halo_layout(rows));
        let fits = halo.shape == [frames.saturating_sub(v.pad_frames), HALO_ROWS, w, c]
            && halo.dtype == self.operands[0].dtype
            && halo.layout == layout;
        if !fits || v.pad_before > 1 || v.pad_after > 1 {
            let message = format!("halo {} for the rows of {}", halo.display_on(self.mesh), shown());
            return rule_error(&T0210, message);
        }
        Ok(())
    }

    /// Returns the axis that shards the rows of the first operand's frames, and the shard. No axis may
    /// shard another dim.
    fn sharded_rows(&self) -> RuleResult<Option<(Axis, Shard)>> {
        let mut found = None;
        for axis in self.mesh.active_axes() {
            match self.operands[0].layout.on_axis(axis) {
                AxisLayout::Replicated => {}
                AxisLayout::Shard(s) if s.dim == 1 => found = Some((axis, s)),
                have => {
                    let (name, shown) = (self.op.opcode.name(), self.display_operand(0));
                    return rule_error(&T0213, format!("{name} of {shown}, which is {have} on {axis}"));
                }
            }
        }
        Ok(found)
    }

    /// Returns the layout of a result whose rows are `scale` of those of the first operand.
    fn scaled_rows_layout(&self, scale: impl Fn(u64) -> u64) -> RuleResult<Layout> {
        let rows = self.sharded_rows()?;
        Ok(rows.map_or(Layout::REPLICATED, |(axis, rows)| scaled_rows(axis, rows, scale)))
    }

    /// Returns the number of frames that precede those of x.
    fn frames_before(&self, v: &views::Conv3d) -> RuleResult<u64> {
        let Some(history) = v.history else { return Ok(v.pad_frames) };
        let (x, history) = (self.operands[0], self.program.type_of(history));
        if v.pad_frames > 0 {
            return rule_error(&T0203, "`pad_frames` beside `history`: both precede the frames of x");
        }
        match history.shape[..] {
            [frames, ..]
                if history.shape.len() == 4
                    && history.shape[1..] == x.shape[1..]
                    && history.dtype == x.dtype
                    && history.layout == x.layout =>
            {
                Ok(frames)
            }
            _ => rule_error(
                &T0210,
                format!("history {} for frames {}", history.display_on(self.mesh), self.display_operand(0)),
            ),
        }
    }

    pub(super) fn upsample_nearest_type(&self, v: &views::UpsampleNearest) -> RuleResult<Type> {
        let [t, h, w, c] = self.frame_shape(0)?;
        let shape = [t, multiply_extents(&[h, v.scale[0]])?, multiply_extents(&[w, v.scale[1]])?, c];
        multiply_extents(&shape)?;
        let layout = self.scaled_rows_layout(|n| n.saturating_mul(v.scale[0]))?;
        Ok(self.type_like_first(shape, layout))
    }

    pub(super) fn channels_to_frames_type(&self, v: &views::ChannelsToFrames) -> RuleResult<Type> {
        let [t, h, w, c] = self.frame_shape(0)?;
        let layout = self.scaled_rows_layout(|n| n)?;
        if !c.is_multiple_of(v.parts) {
            let message = format!("{} parts of the channels of {}", v.parts, self.display_operand(0));
            return rule_error(&T0210, message);
        }
        Ok(self.type_like_first([multiply_extents(&[t, v.parts])?, h, w, c / v.parts], layout))
    }

    pub(super) fn patchify_type(&self, v: &views::Patchify) -> RuleResult<Type> {
        let [t, h, w, c] = self.frame_shape(0)?;
        self.check_replicated(0)?;
        let [ph, pw] = v.patch;
        if !h.is_multiple_of(ph) || !w.is_multiple_of(pw) {
            let message = format!("{} cannot be split into patches of {ph}×{pw}", self.display_operand(0));
            return rule_error(&T0210, message);
        }
        let (tokens, width) = (multiply_extents(&[t, h / ph, w / pw])?, multiply_extents(&[ph, pw, c])?);
        Ok(Type::new(self.operands[0].dtype, [tokens, width]))
    }

    pub(super) fn unpatchify_type(&self, v: &views::Unpatchify) -> RuleResult<Type> {
        let [tokens, width] = self.matrix_shape(0)?;
        self.check_replicated(0)?;
        let ([t, h, w], [ph, pw]) = (v.grid, v.patch);
        let cells = multiply_extents(&v.patch)?;
        if multiply_extents(&v.grid)? != tokens || !width.is_multiple_of(cells) {
            let message = format!(
                "{} does not match a grid of {:?} with patches of {ph}×{pw}",
                self.display_operand(0),
                v.grid
            );
            return rule_error(&T0210, message);
        }
        let shape = [t, multiply_extents(&[h, ph])?, multiply_extents(&[w, pw])?, width / cells];
        Ok(Type::new(self.operands[0].dtype, shape))
    }

    pub(super) fn scale_shift_type(&self) -> RuleResult<Type> {
        let [_, c] = self.row_extents(0)?;
        let last = self.operands[0].shape.len() - 1;
        for vector in [1, 2] {
            self.check_replicated(vector)?;
            self.check_vector_dtype(vector, 0)?;
            if self.operands[vector].shape != [c] {
                let message = format!("vector {} for {c} channels", self.display_operand(vector));
                return rule_error(&T0210, message);
            }
        }
        match self.axis_that_shards(&self.operands[0].layout, last) {
            None => Ok(self.operands[0].clone()),
            Some(axis) => rule_error(
                &T0213,
                format!("a vector of all channels beside channels that are sharded over {axis}"),
            ),
        }
    }

    /// Returns the extents [t, h, w, c] of an operand.
    pub(super) fn frame_shape(&self, operand: usize) -> RuleResult<[u64; 4]> {
        match self.operands[operand].shape[..] {
            [t, h, w, c] => Ok([t, h, w, c]),
            _ => rule_error(
                &T0210,
                format!(
                    "operand {operand} must be frames [t, h, w, c], but is {}",
                    self.display_operand(operand)
                ),
            ),
        }
    }
}

/// Returns the layout of rows that are `scale` of those of a shard.
fn scaled_rows(axis: Axis, rows: Shard, scale: impl Fn(u64) -> u64) -> Layout {
    let uneven = rows.uneven.map(|u| Uneven { extent: scale(u.extent), unit: scale(u.unit) });
    Layout::REPLICATED.with_axis(axis, AxisLayout::Shard(Shard { uneven, ..rows }))
}
