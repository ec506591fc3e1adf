//! Runs a prepared program op by op, in program order.

use std::collections::BTreeMap;

use tessera_device::{Backend, CallData, Fault, Observer, check_input};
use tessera_ir::{Op, OpByKind, Opcode, OrderOp, SinkOp, ValueId, views};

use super::collective_ops::IssuedCollective;
use super::memory::MemoryView;
use super::memory_check::MemoryCheck;
use super::{CpuBackend, OutputValue, PreparedProgram};
use crate::kernels::{PageTable, write_pages};

/// Collectives in flight during one run: by ticket value.
type PendingCollectives = BTreeMap<ValueId, IssuedCollective>;

impl CpuBackend {
    pub(super) fn run_prepared(
        &mut self,
        prepared: &PreparedProgram,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let p = &*prepared.program;
        for op in p.ops.iter().filter(|o| matches!(o.opcode, Opcode::Input | Opcode::Call)) {
            check_input(p, op, call)?;
        }
        self.outputs.values_mut().for_each(|o| o.written = false);
        observer.on_launching(prepared.graph.as_ref()).map_err(Fault::Refused)?;
        let mut pending = PendingCollectives::new();
        self.memory.begin_run();
        let mut check = self.is_poisoned.then(|| MemoryCheck::begin_run(p, &mut self.memory.temporaries));
        for (i, op) in p.ops.iter().enumerate() {
            observer.on_progress(i as u32);
            if let Some(check) = &mut check {
                check.check_op(p, i, &prepared.locations, &self.memory.temporaries)?;
            }
            self.run_op(prepared, i, call, &mut pending, observer)?;
            for r in &op.results {
                self.memory.count_result(&prepared.locations[r.0 as usize]);
            }
            if let Some(check) = &mut check {
                check.end_op(p, i, &prepared.locations, &mut self.memory.temporaries);
            }
        }
        self.peak_bytes = self.memory_use().peak_bytes;
        Ok(())
    }

    fn run_op(
        &mut self,
        prepared: &PreparedProgram,
        i: usize,
        call: &CallData<'_>,
        pending: &mut PendingCollectives,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let op = &prepared.program.ops[i];
        match prepared.views[i].by_kind() {
            OpByKind::Source(_) | OpByKind::Order(OrderOp::EventRecord(_)) => Ok(()),
            OpByKind::Sink(SinkOp::Output(v)) => self.write_output(prepared, op, v, call),
            OpByKind::Sink(SinkOp::CacheWrite(v)) => self.write_buffer_rows(prepared, op, v, call),
            OpByKind::Compute(_) => self.run_compute(prepared, i, call),
            OpByKind::Collective(_) => {
                observer.on_issuing(i).map_err(Fault::Refused)?;
                let issued = self.issue_collective(prepared, i, call)?;
                observer.on_sent(i, issued.sent_bytes);
                observer.on_issued(i);
                if op.issue {
                    pending.insert(op.results[0], issued);
                } else {
                    self.complete_collective(prepared, i, op, issued, observer)?;
                    observer.on_completed(i);
                }
                Ok(())
            }
            OpByKind::Order(OrderOp::Wait(v)) => {
                let name = &prepared.program.name;
                let missing = || Fault::Failed(format!("@{name} op {i} waits for no issued collective"));
                let ticket = pending.remove(&v.ticket).ok_or_else(missing)?;
                let issue = *prepared.issue_ops.get(&v.ticket).ok_or_else(missing)?;
                observer.on_waiting(issue);
                self.complete_collective(prepared, issue, op, ticket, observer)?;
                observer.on_completed(issue);
                Ok(())
            }
        }
    }

    fn write_output(
        &mut self,
        prepared: &PreparedProgram,
        op: &Op,
        v: &views::Output,
        call: &CallData<'_>,
    ) -> Result<(), Fault> {
        let data = self.memory.view_all().view_value(&prepared.locations[v.x.0 as usize], call)?;
        let name = op.name.as_deref().unwrap_or_default();
        if let Some(out) = self.outputs.get_mut(name) {
            out.written = true;
            out.values.clear();
            out.values.extend_from_slice(data);
        } else {
            self.outputs.insert(name.to_string(), OutputValue { written: true, values: data.to_vec() });
        }
        Ok(())
    }

    fn write_buffer_rows(
        &mut self,
        prepared: &PreparedProgram,
        op: &Op,
        v: &views::CacheWrite,
        call: &CallData<'_>,
    ) -> Result<(), Fault> {
        let p = &*prepared.program;
        let width = p.type_of(v.x).shape[1..].iter().product::<u64>() as usize;
        let b = op.buffer.map_or(0, |b| prepared.buffers[b.0 as usize]);
        // The buffer is taken out while its source is read, because the source may be another
        // buffer.
        let mut buffer = std::mem::take(&mut self.memory.buffers[b]);
        let memory = self.memory.view_all();
        let source = BufferSource { prepared, memory, call, view: v };
        let result = match v.pages {
            None => source.write_rows(&mut buffer, width),
            Some(pages) => source.write_pages(&mut buffer, width, pages),
        };
        self.memory.buffers[b] = buffer;
        result.map_err(|fault| match fault {
            Fault::Failed(why) => Fault::Failed(format!("@{}: {why}", p.name)),
            other => other,
        })
    }
}

/// The operands of a write to a buffer.
struct BufferSource<'a> {
    prepared: &'a PreparedProgram,
    memory: MemoryView<'a>,
    call: &'a CallData<'a>,
    view: &'a views::CacheWrite,
}

impl BufferSource<'_> {
    fn values(&self, v: ValueId) -> Result<&[f32], Fault> {
        self.memory.view_value(&self.prepared.locations[v.0 as usize], self.call)
    }

    fn write_rows(&self, buffer: &mut [f32], width: usize) -> Result<(), Fault> {
        let row = match self.view.row {
            None => 0,
            Some(row) => self.prepared.locations[row.0 as usize].integer_scalar(self.call)?,
        };
        let row = row.saturating_add_unsigned(self.view.first_row);
        let data = self.values(self.view.x)?;
        let start = usize::try_from(row).ok().and_then(|r| r.checked_mul(width));
        let end = start.and_then(|s| s.checked_add(data.len())).filter(|e| *e <= buffer.len());
        match (start, end) {
            (Some(s), Some(e)) => {
                buffer[s..e].copy_from_slice(data);
                Ok(())
            }
            _ => Err(Fault::Failed(format!(
                "rows {row} + {} exceed a cache of {} rows",
                data.len() / width.max(1),
                buffer.len() / width.max(1)
            ))),
        }
    }

    fn write_pages(&self, buffer: &mut [f32], width: usize, pages: ValueId) -> Result<(), Fault> {
        let (Some(start), Some(page_rows)) = (self.view.start, self.view.page_rows) else {
            return Err(Fault::Failed("a write to pages without their start and size".to_string()));
        };
        let capacity = buffer.len() / width.max(1);
        let table = PageTable::new(self.values(pages)?, self.values(start)?, page_rows as usize, capacity);
        write_pages(buffer, self.values(self.view.x)?, width, &table.map_err(Fault::Failed)?);
        Ok(())
    }
}
