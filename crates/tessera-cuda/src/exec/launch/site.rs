//! The values of a program as its launches see them: types, and addresses once memory is placed.

use tessera_device::MeshRank;
use tessera_ir::{DType, Op, Program, Type, ValueId, views};
use tessera_mesh::Rank;

use crate::driver::{CudaResult, cuda_failure};
use crate::exec::CudaBackend;
use crate::exec::rope_tables::RopeTables;
use crate::kernel_table::TokenRows;

/// The program of a launch, and where the backend has placed its values.
#[derive(Debug, Clone, Copy)]
pub(in crate::exec) struct LaunchSite<'a> {
    pub(super) p: &'a Program,
    pub(super) placement: MeshRank,
    /// The backend, and the program's index in it. Without them every address is 0: the launch is
    /// built only to know whether there is one, and which kernels it needs.
    placed: Option<(&'a CudaBackend, usize)>,
}

/// Where the rows of a rank lie in the whole tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowSpan {
    /// Index of the first row.
    pub(super) first: u64,
    /// Rows of this rank, padding included.
    pub(super) rows: u64,
    /// Rows of the whole tensor.
    pub(super) all: u64,
    /// Rows of the whole tensor that are no padding.
    pub(super) tokens: u64,
}

impl RowSpan {
    /// Returns the rows of this rank that are no padding, which is at the end.
    pub(super) fn real_rows(&self) -> u64 {
        self.tokens.saturating_sub(self.first).min(self.rows)
    }
}

impl<'a> LaunchSite<'a> {
    pub(in crate::exec) fn without_memory(p: &'a Program) -> LaunchSite<'a> {
        LaunchSite { p, placement: MeshRank { mesh: p.mesh, rank: Rank(0) }, placed: None }
    }

    pub(in crate::exec) fn new(backend: &'a CudaBackend, program: usize) -> LaunchSite<'a> {
        let p = &backend.programs[program].program;
        LaunchSite { p, placement: backend.placement, placed: Some((backend, program)) }
    }

    /// Returns an address that the backend finds, or 0 without memory.
    fn find_address<A: From<u64>>(
        &self,
        find: impl FnOnce(&CudaBackend, usize) -> CudaResult<u64>,
    ) -> CudaResult<A> {
        self.placed.map_or(Ok(0), |(backend, program)| find(backend, program)).map(A::from)
    }

    /// Returns the address of a value.
    pub(super) fn at<A: From<u64>>(&self, v: ValueId) -> CudaResult<A> {
        self.find_address(|backend, program| backend.value_address(program, v))
    }

    /// Returns the address of a value; 0 if there is none.
    pub(super) fn at_optional<A: From<u64>>(&self, v: Option<ValueId>) -> CudaResult<A> {
        v.map_or(Ok(A::from(0)), |v| self.at(v))
    }

    /// Returns the address of the first row that a cache write writes, if the call's row index is 0.
    pub(super) fn write_address<A: From<u64>>(&self, op: &Op, v: &views::CacheWrite) -> CudaResult<A> {
        let first_byte = v.first_row * row_bytes(self.p.type_of(v.x));
        let base: u64 = self.find_address(|backend, program| backend.buffer_address(program, op))?;
        Ok(A::from(base + first_byte))
    }

    /// Returns the address to which a run copies an output.
    pub(super) fn output_address(&self, op: &Op) -> CudaResult<u64> {
        self.find_address(|backend, program| backend.output_address(program, op))
    }

    /// Returns the address of the host's copy of the ids that an op chooses.
    pub(super) fn chosen_ids_address<A: From<u64>>(&self, op: usize) -> CudaResult<A> {
        self.find_address(|backend, program| backend.chosen_ids_address(program, op))
    }

    /// Returns the addresses of the words that an exchange of e4m3 sends and receives.
    pub(super) fn wire_addresses(&self, op: usize) -> CudaResult<[u64; 2]> {
        let found = self.placed.map(|(backend, program)| backend.wire_addresses(program, op));
        Ok(found.transpose()?.flatten().unwrap_or_default())
    }

    /// Returns the address of the list in which a run states where the experts of a weight lie; 0 for a weight in one tier.
    pub(super) fn expert_addresses<A: From<u64>>(&self, w: ValueId) -> CudaResult<A> {
        self.find_address(|backend, program| backend.expert_addresses(program, w))
    }

    pub(super) fn scratch_address(&self) -> CudaResult<u64> {
        self.find_address(|backend, _| backend.scratch_address())
    }

    /// Returns the RoPE tables of an op, and the address that their offsets refer to.
    pub(super) fn rope_tables(&self, op: usize) -> Option<(&'a RopeTables, u64)> {
        let (backend, program) = self.placed?;
        let own = &backend.programs[program];
        Some((own.rope_tables.iter().find(|t| t.op == op)?, own.call_area.device_address()))
    }

    /// Returns the address of a list that ops of the program state as an attribute.
    pub(super) fn list_address<A: From<u64>>(&self, list: &[u64]) -> CudaResult<A> {
        self.find_address(|backend, program| backend.list_address(program, list))
    }

    /// Returns where the rows of a value lie, of which `tokens` rows of the whole tensor are no padding (all by
    /// default).
    pub(super) fn row_span(&self, v: ValueId, tokens: Option<u64>) -> RowSpan {
        let ty = self.p.type_of(v);
        let all = ty.layout.global_shape(&ty.shape, &self.p.mesh)[0];
        let (first, tokens) = (self.first_global_row(ty, 0), tokens.map_or(all, |n| n.min(all)));
        RowSpan { first, rows: ty.shape[0], all, tokens }
    }

    /// Returns where the rows of a value lie among those of sequences, given by the first position of each and, if rows may
    /// bring no token, by its last row. `tokens` rows of the whole tensor are no padding (all by default).
    pub(super) fn token_rows(
        &self,
        v: ValueId,
        tokens: Option<u64>,
        (start, last): (Option<ValueId>, Option<ValueId>),
    ) -> CudaResult<TokenRows> {
        if let Some(other) = start.into_iter().chain(last).find(|s| self.p.type_of(*s).dtype != DType::F32) {
            return cuda_failure(format!("positions of experts' tokens in {}", self.p.type_of(other).dtype));
        }
        let span = self.row_span(v, tokens);
        Ok(TokenRows {
            start: self.at_optional(start)?,
            last: self.at_optional(last)?,
            first_row: span.first as i32,
            tokens: span.tokens as i32,
            sequences: start.map_or(1, |s| self.p.type_of(s).element_count().max(1)) as i32,
        })
    }

    /// Returns the row pitch of a value, in elements.
    pub(super) fn row_pitch(&self, v: ValueId) -> u64 {
        let planned = self.placed.and_then(|(backend, program)| backend.planned_pitch(program, v));
        planned.unwrap_or_else(|| last_extent(self.p.type_of(v)))
    }

    /// Returns the global index of the first row that this rank holds of a value, whose rows begin
    /// `first_row` rows after the shard.
    pub(super) fn first_global_row(&self, ty: &Type, first_row: u64) -> u64 {
        let ranges = ty.layout.global_ranges(&ty.shape, &self.placement.mesh, self.placement.coord());
        ranges.first().map_or(0, |r| r.0) + first_row
    }

    /// Returns the global index of the first column that this rank holds of a value.
    pub(super) fn first_global_column(&self, v: ValueId) -> u64 {
        let ty = self.p.type_of(v);
        let ranges = ty.layout.global_ranges(&ty.shape, &self.placement.mesh, self.placement.coord());
        ranges.last().map_or(0, |r| r.0)
    }

    /// Fails with this reason if an operand or a result of the op is in bf16.
    pub(super) fn refuse_bf16(&self, op: &Op, reason: impl Into<String>) -> CudaResult<()> {
        match op.operands.iter().chain(&op.results).any(|v| self.p.type_of(*v).dtype == DType::Bf16) {
            true => cuda_failure(reason),
            false => Ok(()),
        }
    }
}

/// Returns the extent of the last dim.
pub(super) fn last_extent(ty: &Type) -> u64 {
    ty.shape.last().copied().unwrap_or(1)
}

/// Returns the bytes of one index of the first dim.
pub(in crate::exec) fn row_bytes(ty: &Type) -> u64 {
    ty.shape[1..].iter().product::<u64>() * ty.dtype.element_bytes()
}

/// Fails for segmented sums.
pub(super) fn refuse_segments(segments: u64) -> CudaResult<()> {
    match segments {
        0 | 1 => Ok(()),
        _ => cuda_failure("segmented sums: on GPUs plan with --numerics standard"),
    }
}
