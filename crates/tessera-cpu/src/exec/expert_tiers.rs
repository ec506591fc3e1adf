//! Experts in two tiers: the pools of a rank, and the transfers into them. A pool is the fast memory for a few experts of a
//! weight; a pool slot holds one.
//!
//! The rank's own thread decides when a layer begins ([`ExpertPools`]), and a pool slot carries the decisions out in order
//! as its memory comes free.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::{
    AheadRequest, ExpertBank, ExpertPools, ExpertReport, ExpertTransfer, Fault, MeshRank, PooledExpert,
};
use tessera_ir::{ExpertTier, Type};

use super::expert_io::{ExpertIo, FetchOrder, FetchedExpert};
use super::memory::is_narrow;
use super::weight_units::{locate_unit, units_of_rows};
use crate::kernels::{PackedWeight, UNPACK_ROWS};

/// The layers of the loaded programs whose experts lie in two tiers.
#[derive(Debug, Default)]
pub(super) struct ExpertTiers {
    pools: ExpertPools,
    /// The layers in the order of the pools.
    layers: Vec<LayerRun>,
    banks: Vec<TieredBank>,
    io: Option<ExpertIo>,
    /// Orders without an answer.
    in_flight: usize,
    report: ExpertReport,
}

/// The weights of a layer, and how far the current run of the layer has come.
#[derive(Debug, Default)]
struct LayerRun {
    banks: Vec<usize>,
    /// The experts of the current run in the order in which they are multiplied.
    uses: Vec<PooledExpert>,
    /// How many weights of the layer the current run has multiplied.
    passes: usize,
}

/// A weight whose experts lie in host memory.
#[derive(Debug)]
pub(super) struct TieredBank {
    name: String,
    layer: usize,
    ty: Type,
    source: Arc<dyn ExpertBank>,
    slots: Vec<PoolSlot>,
    /// Bytes that a slot takes, with the padding of packed matrices.
    slot_bytes: usize,
}

/// A slot of the pool: fast memory for one expert of a weight.
#[derive(Debug)]
struct PoolSlot {
    /// `None` while a transfer or a multiplication has the memory.
    memory: Option<PackedWeight>,
    /// The expert in the memory, or on its way there.
    current: Option<usize>,
    /// Whether the current run has yet to multiply it.
    is_due: bool,
    /// Experts that follow, in order.
    turns: VecDeque<Turn>,
}

#[derive(Debug)]
struct Turn {
    expert: usize,
    is_due: bool,
    is_prefetch: bool,
}

impl ExpertTiers {
    /// Adds a weight of a program with empty slots, and returns its index.
    ///
    /// # Errors
    /// T0804 if the thread that fetches cannot be started.
    pub(super) fn add_bank(
        &mut self,
        (program, name): (&str, &str),
        (tier, ty): (ExpertTier, &Type),
        placement: &MeshRank,
        source: Arc<dyn ExpertBank>,
    ) -> Result<usize, Diagnostic> {
        if self.io.is_none() {
            self.io = Some(ExpertIo::start()?);
        }
        let at = self.banks.len();
        let count = tier.pool_size(ty.shape[0]) as usize;
        let (n, k) = (ty.shape[1] as usize, ty.shape[2] as usize);
        let empty = PackedWeight::zeros(n, k, is_narrow(ty));
        let slot_bytes = empty.allocated_bytes();
        let slot = |_| PoolSlot {
            memory: Some(empty.clone()),
            current: None,
            is_due: false,
            turns: VecDeque::new(),
        };
        let slots = (0..count).map(slot).collect();
        let ranges = ty.layout.global_ranges(&ty.shape, &placement.mesh, placement.coord());
        let first_expert = ranges.first().map_or(0, |(start, _)| *start);
        let layer = self.pools.add_weight(program, tier, ty, first_expert);
        self.layers.resize_with(self.pools.layer_count(), LayerRun::default);
        self.layers[layer].banks.push(at);
        let (name, ty) = (name.to_string(), ty.clone());
        self.banks.push(TieredBank { name, layer, ty, source, slots, slot_bytes });
        Ok(at)
    }

    /// Replaces the experts of a weight and forgets those in its slots.
    pub(super) fn replace_source(&mut self, bank: usize, source: Arc<dyn ExpertBank>) {
        self.reset();
        self.banks[bank].source = source;
    }

    /// Returns the bytes of all slots.
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.banks.iter().map(|bank| bank.slots.len() * bank.slot_bytes).sum::<usize>() as u64
    }

    /// Begins to multiply a weight by the experts `needed`, ascending. Returns them in the order in which the slots will
    /// hold them: a result row has one expert, so no bit depends on the order.
    ///
    /// # Errors
    /// A transfer that failed.
    pub(super) fn begin_pass(&mut self, bank: usize, needed: &[usize]) -> Result<Vec<PooledExpert>, Fault> {
        while let Some(answer) = self.io.as_ref().and_then(ExpertIo::take_answer) {
            self.take_in(answer)?;
        }
        let layer = self.banks[bank].layer;
        if self.layers[layer].passes == 0 {
            self.start_layer(layer, needed);
            let requests = self.pools.request_ahead(layer, false);
            self.queue_requests(&requests);
        }
        Ok(self.layers[layer].uses.clone())
    }

    /// Waits until a slot holds an expert, and lends its matrix.
    ///
    /// # Errors
    /// A transfer that failed.
    pub(super) fn lend_expert(&mut self, bank: usize, used: PooledExpert) -> Result<PackedWeight, Fault> {
        let mut begin = None;
        loop {
            let slot = &mut self.banks[bank].slots[used.slot];
            if slot.current == Some(used.expert)
                && let Some(memory) = slot.memory.take()
            {
                let waited = begin.map_or(0, |begin: Instant| begin.elapsed().as_nanos() as u64);
                self.pools.add_wait(self.banks[bank].layer, waited);
                return Ok(memory);
            }
            begin.get_or_insert_with(Instant::now);
            self.wait_for_transfer()?;
        }
    }

    /// Takes a matrix back that [`ExpertTiers::lend_expert`] lent; the slot may then hold its next expert.
    pub(super) fn return_expert(&mut self, bank: usize, used: PooledExpert, memory: PackedWeight) {
        let slot = &mut self.banks[bank].slots[used.slot];
        slot.memory = Some(memory);
        slot.is_due = false;
        self.advance(bank, used.slot);
    }

    /// Ends the multiplication of a weight; that of the last weight ends the layer.
    pub(super) fn end_pass(&mut self, bank: usize) {
        let layer = self.banks[bank].layer;
        let run = &mut self.layers[layer];
        run.passes += 1;
        if run.passes < run.banks.len() {
            return;
        }
        run.passes = 0;
        self.report.layers.push(self.pools.end_layer(layer));
        let requests = self.pools.request_ahead(layer, true);
        self.queue_requests(&requests);
    }

    /// Returns what happened since the last call, and forgets it.
    pub(super) fn take_report(&mut self) -> ExpertReport {
        std::mem::take(&mut self.report)
    }

    /// Empties every slot and forgets which experts were used.
    pub(super) fn reset(&mut self) {
        for slot in self.banks.iter_mut().flat_map(|bank| &mut bank.slots) {
            slot.turns.clear();
            slot.is_due = false;
        }
        while self.in_flight > 0 {
            let before = self.in_flight;
            // A transfer that failed leaves an empty slot like any other; without an answer no slot comes back.
            if self.wait_for_transfer().is_err() && self.in_flight == before {
                break;
            }
        }
        self.banks.iter_mut().flat_map(|bank| &mut bank.slots).for_each(|slot| slot.current = None);
        self.pools.reset();
        for run in &mut self.layers {
            run.uses.clear();
            run.passes = 0;
        }
        self.report = ExpertReport::default();
    }

    /// Returns the number of units in which a weight is hashed: rows of an expert, as a packed matrix has them.
    pub(super) fn unit_count(&self, bank: usize) -> usize {
        let bank = &self.banks[bank];
        bank.ty.shape[0] as usize * bank.units_of_expert()
    }

    /// Returns the elements of a unit.
    pub(super) fn unit_elements(&self, bank: usize, unit: usize) -> usize {
        let bank = &self.banks[bank];
        let ((n, k), (_, first_row)) = (bank.matrix_shape(), bank.locate_unit(unit));
        (n - first_row).min(UNPACK_ROWS) * k
    }

    /// Reads a unit from the tier in which its expert lies. Rows that host memory refuses stay empty, so the digest of
    /// the weight differs from its fingerprint.
    pub(super) fn read_unit(&self, bank: usize, unit: usize, rows: &mut Vec<f32>) {
        let elements = self.unit_elements(bank, unit);
        let bank = &self.banks[bank];
        let (expert, first_row) = bank.locate_unit(unit);
        if let Some(matrix) = bank.find_resident(expert) {
            return matrix.unpack_rows(first_row, rows);
        }
        rows.clear();
        rows.resize(elements, 0.0);
        if bank.source.read_rows(expert as u64, first_row as u64, rows).is_err() {
            rows.clear();
        }
    }

    /// Returns an element of a weight, from the tier in which its expert lies.
    pub(super) fn read_element(&self, bank: usize, index: usize) -> Option<f32> {
        let (_, k) = self.banks[bank].matrix_shape();
        let (expert, at) = self.banks[bank].locate_element(index);
        if expert as u64 >= self.banks[bank].ty.shape[0] {
            return None;
        }
        if let Some(matrix) = self.banks[bank].find_resident(expert) {
            return matrix.get(at);
        }
        let mut row = vec![0.0; k];
        self.banks[bank].source.read_rows(expert as u64, (at / k) as u64, &mut row).ok()?;
        row.get(at % k).copied()
    }

    /// Sets an element in fast memory. Returns `false` if its expert does not lie there: host memory is shared.
    pub(super) fn write_element(&mut self, bank: usize, index: usize, value: f32) -> bool {
        let (expert, at) = self.banks[bank].locate_element(index);
        let mut slots = self.banks[bank].slots.iter_mut().filter(|slot| slot.current == Some(expert));
        slots.find_map(|slot| slot.memory.as_mut()).is_some_and(|matrix| matrix.set(at, value))
    }

    /// Decides where the experts of a run lie, and requests those that no slot holds.
    fn start_layer(&mut self, layer: usize, needed: &[usize]) {
        let start = self.pools.start_layer(layer, needed);
        for bank in self.layers[layer].banks.clone() {
            for used in &start.held {
                let slot = &mut self.banks[bank].slots[used.slot];
                match slot.turns.back_mut() {
                    Some(turn) => turn.is_due = true,
                    None => slot.is_due = true,
                }
            }
            for used in &start.fetched {
                self.queue_turn(bank, *used, (true, false));
            }
        }
        self.layers[layer].uses = start.held.into_iter().chain(start.fetched).collect();
    }

    fn queue_requests(&mut self, requests: &[AheadRequest]) {
        for request in requests {
            for bank in self.layers[request.layer].banks.clone() {
                request.fetched.iter().for_each(|pooled| self.queue_turn(bank, *pooled, (false, true)));
            }
        }
    }

    /// Appends an expert to those of a slot.
    fn queue_turn(&mut self, bank: usize, pooled: PooledExpert, (is_due, is_prefetch): (bool, bool)) {
        let PooledExpert { expert, slot } = pooled;
        self.banks[bank].slots[slot].turns.push_back(Turn { expert, is_due, is_prefetch });
        self.advance(bank, slot);
    }

    /// Orders the next expert of a slot, if the memory is here and its present expert is no longer due.
    fn advance(&mut self, at: usize, slot: usize) {
        let bank = &mut self.banks[at];
        let PoolSlot { memory, current, is_due, turns } = &mut bank.slots[slot];
        if *is_due || turns.is_empty() {
            return;
        }
        let (Some(io), Some(memory)) = (&self.io, memory.take()) else { return };
        let Some(turn) = turns.pop_front() else { return };
        (*current, *is_due) = (Some(turn.expert), turn.is_due);
        io.request(FetchOrder {
            place: (at, slot),
            expert: turn.expert,
            is_prefetch: turn.is_prefetch,
            is_due: turn.is_due,
            source: Arc::clone(&bank.source),
            dtype: bank.ty.dtype,
            memory,
        });
        self.in_flight += 1;
    }

    fn wait_for_transfer(&mut self) -> Result<(), Fault> {
        let ended = || Fault::Failed("the transfer of an expert has ended without an answer".to_string());
        let io = self.io.as_ref().filter(|_| self.in_flight > 0).ok_or_else(ended)?;
        let answer = io.wait_for_answer().ok_or_else(ended)?;
        self.take_in(answer)
    }

    /// Puts the memory of an answer into its slot.
    fn take_in(&mut self, answer: FetchedExpert) -> Result<(), Fault> {
        let FetchedExpert { place: (at, slot), expert, is_prefetch, memory, begin, end, outcome } = answer;
        self.in_flight -= 1;
        let bank = &mut self.banks[at];
        bank.slots[slot].memory = Some(memory);
        let (weight, expert) = (bank.name.clone(), self.pools.global_expert(bank.layer, expert));
        self.report.transfers.push(ExpertTransfer { weight, expert, is_prefetch, begin, end });
        if let Err(d) = outcome {
            bank.slots[slot].current = None;
            let why = format!("expert {expert} of `{}` cannot be fetched: {}", bank.name, d.message);
            return Err(Fault::Failed(why));
        }
        self.advance(at, slot);
        Ok(())
    }
}

impl TieredBank {
    /// Returns the extents of an expert's matrix on this rank.
    fn matrix_shape(&self) -> (usize, usize) {
        (self.ty.shape[1] as usize, self.ty.shape[2] as usize)
    }

    fn units_of_expert(&self) -> usize {
        units_of_rows(self.matrix_shape().0)
    }

    /// Returns the expert of a unit, and the unit's first row in its matrix.
    fn locate_unit(&self, unit: usize) -> (usize, usize) {
        locate_unit(self.units_of_expert(), unit)
    }

    /// Returns the expert of an element, and the element's index in its matrix.
    fn locate_element(&self, index: usize) -> (usize, usize) {
        let (n, k) = self.matrix_shape();
        (index / (n * k).max(1), index % (n * k).max(1))
    }

    fn find_resident(&self, expert: usize) -> Option<&PackedWeight> {
        self.slots.iter().find(|slot| slot.current == Some(expert))?.memory.as_ref()
    }
}
