//! Experts in two tiers: which experts the pools of a rank hold, when they are fetched, and the counts of both. A pool is
//! the fast memory for a few experts of a weight; a pool slot holds one.
//!
//! Decisions are made on the rank's own thread when a layer begins, and a pool slot carries them out in order as its
//! memory comes free. They depend on the routing and the policy alone, so counts repeat from run to run however fast the
//! transfers are. No decision changes a value or a collective, so ranks may decide differently.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::{ExpertBank, ExpertReport, ExpertTransfer, Fault, LayerTransfers, MeshRank};
use tessera_ir::{CacheFetch, ExpertCache, ExpertTier, Type};

use super::expert_io::{ExpertIo, FetchOrder, FetchedExpert};
use super::memory::is_narrow;
use super::weight_units::{locate_unit, units_of_rows};
use crate::kernels::{PackedWeight, UNPACK_ROWS};

/// The layers of the loaded programs whose experts lie in two tiers.
#[derive(Debug, Default)]
pub(super) struct ExpertTiers {
    /// Layers by program and number.
    layers: BTreeMap<(String, u64), TieredLayer>,
    banks: Vec<TieredBank>,
    io: Option<ExpertIo>,
    /// Orders without an answer.
    in_flight: usize,
    report: ExpertReport,
}

/// An expert that a layer uses in this run, and the pool slot in which it lies or will lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ExpertUse {
    pub(super) expert: usize,
    slot: usize,
}

/// A weight whose experts lie in host memory.
#[derive(Debug)]
pub(super) struct TieredBank {
    name: String,
    layer: (String, u64),
    ty: Type,
    source: Arc<dyn ExpertBank>,
    slots: Vec<PoolSlot>,
    /// Bytes that a slot takes, with the padding of packed matrices.
    slot_bytes: usize,
}

#[derive(Debug)]
struct TieredLayer {
    tier: ExpertTier,
    /// Number of the rank's first expert in the whole weight.
    first_expert: usize,
    banks: Vec<usize>,
    cache: ExpertCache,
    /// The expert that each pool slot holds once its transfers have ended.
    holders: Vec<Option<usize>>,
    /// Experts that were requested ahead, until the layer begins.
    ahead: BTreeSet<usize>,
    /// Number of runs so far.
    step: usize,
    /// The experts of the current run in the order in which they are multiplied.
    uses: Vec<ExpertUse>,
    /// How many weights of the layer the current run has multiplied.
    passes: usize,
    counts: LayerTransfers,
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
        let (at, key) = (self.banks.len(), (program.to_string(), tier.layer));
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
        let layer = self.layers.entry(key.clone()).or_insert_with(|| TieredLayer {
            tier,
            first_expert: ranges.first().map_or(0, |(start, _)| *start as usize),
            banks: Vec::new(),
            cache: ExpertCache::new(count, tier.policy),
            holders: vec![None; count],
            ahead: BTreeSet::new(),
            step: 0,
            uses: Vec::new(),
            passes: 0,
            counts: LayerTransfers::empty(tier.layer),
        });
        layer.banks.push(at);
        let (name, ty) = (name.to_string(), ty.clone());
        self.banks.push(TieredBank { name, layer: key, ty, source, slots, slot_bytes });
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
    pub(super) fn begin_pass(&mut self, bank: usize, needed: &[usize]) -> Result<Vec<ExpertUse>, Fault> {
        while let Some(answer) = self.io.as_ref().and_then(ExpertIo::take_answer) {
            self.take_in(answer)?;
        }
        let key = self.banks[bank].layer.clone();
        let is_first = self.layers.get(&key).is_some_and(|layer| layer.passes == 0);
        if is_first {
            self.begin_layer(&key, needed);
            self.request_ahead(&key, false);
        }
        Ok(self.layers.get(&key).map(|layer| layer.uses.clone()).unwrap_or_default())
    }

    /// Waits until a slot holds an expert, and lends its matrix.
    ///
    /// # Errors
    /// A transfer that failed.
    pub(super) fn lend_expert(&mut self, bank: usize, used: ExpertUse) -> Result<PackedWeight, Fault> {
        let mut begin = None;
        loop {
            let slot = &mut self.banks[bank].slots[used.slot];
            if slot.current == Some(used.expert)
                && let Some(memory) = slot.memory.take()
            {
                let waited = begin.map_or(0, |begin: Instant| begin.elapsed().as_nanos() as u64);
                if let Some(layer) = self.layers.get_mut(&self.banks[bank].layer) {
                    layer.counts.waited_ns += waited;
                }
                return Ok(memory);
            }
            begin.get_or_insert_with(Instant::now);
            self.wait_for_transfer()?;
        }
    }

    /// Takes a matrix back that [`ExpertTiers::lend_expert`] lent; the slot may then hold its next expert.
    pub(super) fn return_expert(&mut self, bank: usize, used: ExpertUse, memory: PackedWeight) {
        let slot = &mut self.banks[bank].slots[used.slot];
        slot.memory = Some(memory);
        slot.is_due = false;
        self.advance(bank, used.slot);
    }

    /// Ends the multiplication of a weight; that of the last weight ends the layer.
    pub(super) fn end_pass(&mut self, bank: usize) {
        let key = self.banks[bank].layer.clone();
        let Some(layer) = self.layers.get_mut(&key) else { return };
        layer.passes += 1;
        if layer.passes < layer.banks.len() {
            return;
        }
        layer.passes = 0;
        layer.step += 1;
        let next = LayerTransfers::empty(layer.tier.layer);
        self.report.layers.push(std::mem::replace(&mut layer.counts, next));
        self.request_ahead(&key, true);
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
        for layer in self.layers.values_mut() {
            layer.cache = ExpertCache::new(layer.holders.len(), layer.tier.policy);
            layer.holders.fill(None);
            layer.ahead.clear();
            layer.uses.clear();
            (layer.step, layer.passes) = (0, 0);
            layer.counts = LayerTransfers::empty(layer.tier.layer);
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
    fn begin_layer(&mut self, key: &(String, u64), needed: &[usize]) {
        let Some(layer) = self.layers.get_mut(key) else { return };
        let step = layer.step;
        let ahead = std::mem::take(&mut layer.ahead);
        let used_ahead = needed.iter().filter(|expert| ahead.contains(expert)).count() as u64;
        layer.counts.prefetches_used += used_ahead;
        layer.counts.prefetches_unused += ahead.len() as u64 - used_ahead;
        // Experts that slots hold come first, so that none of them is evicted before its use.
        let (held, missing): (Vec<usize>, Vec<usize>) = needed.iter().partition(|e| layer.cache.holds(**e));
        layer.counts.hits += held.len() as u64;
        layer.counts.stalls += missing.len() as u64;
        layer.uses.clear();
        let mut turns = Vec::new();
        for expert in held {
            layer.cache.count_request(expert, step);
            let slot = layer.holders.iter().position(|holder| *holder == Some(expert)).unwrap_or(0);
            layer.uses.push(ExpertUse { expert, slot });
        }
        let held = layer.uses.clone();
        for expert in missing {
            if let Some(slot) = layer.assign_slot(expert, &[]) {
                layer.uses.push(ExpertUse { expert, slot });
                turns.push((slot, expert));
            }
            layer.cache.count_request(expert, step);
        }
        let banks = layer.banks.clone();
        for bank in banks {
            for used in &held {
                let slot = &mut self.banks[bank].slots[used.slot];
                match slot.turns.back_mut() {
                    Some(turn) => turn.is_due = true,
                    None => slot.is_due = true,
                }
            }
            for (slot, expert) in &turns {
                self.queue_turn(bank, *slot, Turn { expert: *expert, is_due: true, is_prefetch: false });
            }
        }
    }

    /// Requests the likely experts of the layers that `key` announces: when it begins, of those that stand a window behind
    /// it, in this run or in the next; when it ends, its own, if its window spans all layers. Earlier requests would take
    /// slots from experts that this run still uses.
    fn request_ahead(&mut self, key: &(String, u64), has_ended: bool) {
        let of_program = |other: &&(String, u64)| other.0 == key.0;
        let count = self.layers.keys().filter(of_program).count() as u64;
        let is_announced = |(other, layer): &(&(String, u64), &TieredLayer)| match layer.tier.window {
            window if window >= count => has_ended && *other == key,
            window => !has_ended && (key.1 + window) % count == other.1,
        };
        let own = self.layers.iter().filter(|(other, _)| of_program(other));
        let targets: Vec<(String, u64)> = own.filter(is_announced).map(|(other, _)| other.clone()).collect();
        for target in targets {
            self.request_likely_experts(&target);
        }
    }

    /// Requests the experts that the next run of a layer will likely use and that no slot holds.
    fn request_likely_experts(&mut self, key: &(String, u64)) {
        let Some(layer) = self.layers.get_mut(key) else { return };
        let likely = layer.cache.list_likely_experts(layer.step);
        let mut turns = Vec::new();
        for expert in &likely {
            if let Some(slot) = layer.assign_slot(*expert, &likely) {
                layer.ahead.insert(*expert);
                layer.counts.prefetches += 1;
                turns.push((slot, *expert));
            }
        }
        for bank in layer.banks.clone() {
            for (slot, expert) in &turns {
                self.queue_turn(bank, *slot, Turn { expert: *expert, is_due: false, is_prefetch: true });
            }
        }
    }

    /// Appends an expert to those of a slot.
    fn queue_turn(&mut self, bank: usize, slot: usize, turn: Turn) {
        let TieredBank { ty, layer, slots, .. } = &mut self.banks[bank];
        slots[slot].turns.push_back(turn);
        if let Some(layer) = self.layers.get_mut(layer) {
            layer.counts.moved_bytes += ty.byte_size().0.checked_div(ty.shape[0]).unwrap_or(0);
        }
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
        let first = self.layers.get(&bank.layer).map_or(0, |layer| layer.first_expert);
        let (weight, expert) = (bank.name.clone(), (first + expert) as u64);
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

impl TieredLayer {
    /// Gives an expert a slot: an empty one, or that of the expert which the policy evicts for it. Returns `None` if a
    /// slot holds it already, or holds only experts that are `spared`.
    fn assign_slot(&mut self, expert: usize, spared: &[usize]) -> Option<usize> {
        let fetch = self.cache.fetch_expert(expert, self.step, spared);
        let CacheFetch::Added { evicted } = fetch else { return None };
        let slot = self.holders.iter().position(|holder| *holder == evicted)?;
        self.holders[slot] = Some(expert);
        if let Some(evicted) = evicted {
            self.counts.evicted.push((self.first_expert + evicted) as u64);
            self.counts.prefetches_unused += u64::from(self.ahead.remove(&evicted));
        }
        Some(slot)
    }
}
