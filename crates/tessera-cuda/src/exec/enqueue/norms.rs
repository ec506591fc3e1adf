//! Launches the kernels that norms share with their neighbours: residual adds with norms and
//! quantization, and RMS norms with RoPE and cache writes.

use tessera_ir::{Op, Opcode, ValueId};

use crate::collectives::Targets;
use crate::driver::{CudaResult, CudaStream, KernelArgs};
use crate::exec::{CudaBackend, RopeTables};

impl CudaBackend {
    pub(super) fn launch_residual_norm(
        &mut self,
        program: usize,
        add: Option<usize>,
        norm: Option<usize>,
        quantize: Option<usize>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let (add, norm) = (add.map(|i| &p.ops[i]), norm.map(|i| &p.ops[i]));
        let quantize = quantize.map(|i| &p.ops[i]);
        let Some(first) = add.or(norm) else { return Ok(()) };
        let ty = p.type_of(first.operands[0]);
        let at = |op: Option<&Op>, i: usize| -> CudaResult<u64> {
            op.and_then(|o| o.operands.get(i)).map_or(Ok(0), |v| self.value_address(program, *v))
        };
        let result = |op: Option<&Op>| op.map_or(Ok(0), |o| self.value_address(program, o.results[0]));
        let int = |op: Option<&Op>, name: &str| op.and_then(|o| o.int_attr(name));
        let affine = norm.is_some_and(|o| o.opcode == Opcode::LayerNorm);
        let modulated = norm.filter(|_| !affine);
        let table = |v: Option<&ValueId>| -> CudaResult<(u64, u64)> {
            match v {
                Some(v) => {
                    Ok((self.value_address(program, *v)?, p.type_of(*v).shape.last().copied().unwrap_or(0)))
                }
                None => Ok((0, 0)),
            }
        };
        let (gates, gate_columns) = table(add.and_then(|o| o.operands.get(2)))?;
        let (m, columns) = table(modulated.and_then(|o| o.operands.get(1)))?;
        let gate = int(add, "gate").unwrap_or(0);
        let frame_rows = int(add, "frame_rows").or(int(norm, "frame_rows")).unwrap_or(1).max(1);
        let eps = norm.and_then(|o| o.float_attr("eps")).unwrap_or(1e-6) as f32;
        let affine = if affine { norm } else { None };
        let args = KernelArgs::new()
            .with_int(ty.shape[0] as i64)
            .with_address(at(Some(first), 0)?)
            .with_address(at(add, 1)?);
        let args = args
            .with_address(gates)
            .with_int(gate_columns as i64)
            .with_int(gate)
            .with_address(m)
            .with_int(columns as i64);
        let args = args
            .with_int(int(modulated, "shift").unwrap_or(0))
            .with_int(int(modulated, "scale").unwrap_or(0));
        let args = args.with_address(at(affine, 1)?).with_address(at(affine, 2)?).with_address(result(add)?);
        let narrow = |i: usize| quantize.map_or(Ok(0), |o| self.value_address(program, o.results[i]));
        let wide = if quantize.is_some() { 0 } else { result(norm)? };
        let args = args.with_address(wide).with_address(narrow(0)?).with_address(narrow(1)?);
        // If both ops define the first row, they agree.
        let places = add.filter(|o| o.operands.len() > 2).or(norm).unwrap_or(first);
        let args =
            args.with_int(self.first_global_row(places, ty) as i64).with_int(frame_rows).with_float(eps);
        self.kernels.launch_rows("residual_norm", (ty.shape[0], ty.shape[1], ty.dtype), args, stream)
    }

    pub(super) fn launch_rms_rope(
        &mut self,
        program: usize,
        scale: Option<usize>,
        rope: Option<usize>,
        write: Option<usize>,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let own = &self.programs[program];
        let p = std::sync::Arc::clone(&own.program);
        let (Some(first), Some(last)) = (scale.or(rope).or(write), write.or(rope).or(scale)) else {
            return Ok(());
        };
        let ty = p.type_of(p.ops[first].operands[0]);
        let (out, row) = match write.map(|i| &p.ops[i]) {
            Some(op) => (self.write_address(program, op)?, self.keyed_address(program, op, "row")?),
            None => (self.value_address(program, p.ops[last].results[0])?, 0),
        };
        let x = p.ops[first].operands[0];
        let args =
            KernelArgs::new().with_int(ty.shape[0] as i64).with_address(self.value_address(program, x)?);
        let args = args.with_int(self.row_pitch(program, x) as i64);
        let args = match scale.map(|i| &p.ops[i]) {
            None => {
                args.with_address(0).with_address(0).with_int(0).with_int(0).with_float(1.0).with_float(0.0)
            }
            Some(op) => {
                let own_sum = op.opcode == Opcode::RmsNorm;
                let w = self.value_address(program, op.operands[if own_sum { 1 } else { 2 }])?;
                let (sums, columns) = match own_sum {
                    true => (0, 0),
                    false => {
                        (self.value_address(program, op.operands[1])?, p.type_of(op.operands[1]).shape[1])
                    }
                };
                let whole = op.int_attr("width").unwrap_or(ty.shape[1] as i64) as f32;
                let args = args
                    .with_address(w)
                    .with_address(sums)
                    .with_int(columns as i64)
                    .with_int(op.int_attr("col").unwrap_or(0));
                args.with_float(whole).with_float(op.float_attr("eps").unwrap_or(1e-6) as f32)
            }
        };
        let args = args.with_address(out).with_address(row);
        let args = match rope.and_then(|i| own.rope_tables.iter().find(|t| t.op == i)) {
            None => args
                .with_int(0)
                .with_address(0)
                .with_address(0)
                .with_address(0)
                .with_int(0)
                .with_int(1)
                .with_int(1)
                .with_int(0),
            Some(RopeTables {
                head_dim: head,
                grid,
                frame_stride: stride,
                frame_table: by_frame,
                row_table: by_row,
                column_table: by_column,
                ..
            }) => {
                let area = own.call_area.device_address();
                let args = args
                    .with_int(*head as i64)
                    .with_address(area + by_frame)
                    .with_address(area + by_row)
                    .with_address(area + by_column);
                let row = rope.map_or(0, |i| self.first_global_row(&p.ops[i], ty));
                let args = args.with_int(row as i64).with_int(grid[0] as i64).with_int(grid[1] as i64);
                args.with_int(i64::from(*stride != 0))
            }
        };
        let args = args.with_struct(targets.copied().unwrap_or_default().pack_words());
        self.kernels.launch_rows("rms_rope", (ty.shape[0], ty.shape[1], ty.dtype), args, stream)
    }
}
