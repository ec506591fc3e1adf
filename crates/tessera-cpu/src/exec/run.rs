//! Runs a prepared program op by op, in program order.

use std::collections::BTreeMap;

use tessera_device::{Backend, CallData, Fault, Observer, check_input};
use tessera_ir::{Op, OpByKind, Opcode, OrderOp, SinkOp, ValueId, views};

use super::memory_check::MemoryCheck;
use super::{CpuBackend, OutputValue, PreparedProgram};
use crate::kernels::{PageTable, write_pages};
use crate::transport::Ticket;

/// Collectives in flight during one run: by ticket value, the index in `endpoints` and the ticket.
type PendingCollectives = BTreeMap<ValueId, (usize, Ticket)>;

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
                let ticket = self.issue_collective(prepared, i, call)?;
                observer.on_issued(i);
                if op.issue {
                    pending.insert(op.results[0], ticket);
                } else {
                    self.complete_collective(prepared, i, op, ticket, observer)?;
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
        if v.pages.is_some() {
            return self.write_buffer_pages(prepared, op, v, call);
        }
        let p = &*prepared.program;
        let source = &prepared.locations[v.x.0 as usize];
        let width: usize = p.type_of(v.x).shape[1..].iter().product::<u64>() as usize;
        let row = match v.row {
            None => 0,
            Some(row) => prepared.locations[row.0 as usize].integer_scalar(call)?,
        };
        let row = row.saturating_add_unsigned(v.first_row);
        let b = op.buffer.map_or(0, |b| prepared.buffers[b.0 as usize]);
        // The buffer is taken out while its source is read, because the source may be another
        // buffer.
        let mut buffer = std::mem::take(&mut self.memory.buffers[b]);
        let result = self.memory.view_all().view_value(source, call).and_then(|data| {
            let start = usize::try_from(row).ok().and_then(|r| r.checked_mul(width));
            let end = start.and_then(|s| s.checked_add(data.len())).filter(|e| *e <= buffer.len());
            match (start, end) {
                (Some(s), Some(e)) => {
                    buffer[s..e].copy_from_slice(data);
                    Ok(())
                }
                _ => Err(Fault::Failed(format!(
                    "@{}: rows {row} + {} exceed a cache of {} rows",
                    p.name,
                    data.len() / width.max(1),
                    buffer.len() / width.max(1)
                ))),
            }
        });
        self.memory.buffers[b] = buffer;
        result
    }

    fn write_buffer_pages(
        &mut self,
        prepared: &PreparedProgram,
        op: &Op,
        v: &views::CacheWrite,
        call: &CallData<'_>,
    ) -> Result<(), Fault> {
        let (Some(pages), Some(start), Some(page_rows)) = (v.pages, v.start, v.page_rows) else {
            return Err(Fault::Failed(format!(
                "@{}: a write to pages without a table",
                prepared.program.name
            )));
        };
        let width = prepared.program.type_of(v.x).shape[1..].iter().product::<u64>() as usize;
        let b = op.buffer.map_or(0, |b| prepared.buffers[b.0 as usize]);
        let mut buffer = std::mem::take(&mut self.memory.buffers[b]);
        let memory = self.memory.view_all();
        let view = |v: ValueId| memory.view_value(&prepared.locations[v.0 as usize], call);
        let result = (|| {
            let capacity = buffer.len() / width.max(1);
            let table = PageTable::new(view(pages)?, view(start)?, page_rows as usize, capacity)
                .map_err(|why| Fault::Failed(format!("@{}: {why}", prepared.program.name)))?;
            write_pages(&mut buffer, view(v.x)?, width, &table);
            Ok(())
        })();
        self.memory.buffers[b] = buffer;
        result
    }
}
