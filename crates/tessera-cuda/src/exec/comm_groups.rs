//! The communicators of a rank: one group per route, translation of collective ops into group
//! operations, progress reports, and device faults expressed as ranks and ops.

#![allow(unsafe_code, reason = "collectives on the memory of the backend")]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Duration;

use tessera_device::{
    AbortFn, CommRoute, Fault, JoinedCommunicator, MeshRank, Observer, UsedTransport, as_matrix,
    collective_signature, exchanged_shape, shard_ranges,
};
use tessera_ir::{CollectiveOp, CommAxis, Op, OpByKind, OpView, Program, Type, ValueId, views};
use tessera_mesh::{Axis, AxisLayout};

use super::wire_words::type_on_wire;
use super::{CommunicatorMember, CudaBackend, CudaOptions, PreparedProgram, ValueLocation};
use crate::collectives::{
    CollectiveGroup, CollectiveKind, DeviceProgress, GroupAborter, GroupCollective, GroupConfig, GroupFault,
    GroupTransport, NO_OFFSET, Rendezvous, SplitDim, Synchronization, Targets,
};
use crate::compile::Compiler;
use crate::device_memory::DeviceMemory;
use crate::driver::{CudaError, CudaResult, CudaStream, cuda_failure};
use crate::fusion::comm_fusion::CommOffload;
use crate::libraries::Libraries;
use crate::thread_ranks::ThreadRank;

/// The communicators that a rank has joined, each with the route by which ops name it.
#[derive(Debug)]
pub(super) struct CommGroups {
    routed_groups: Vec<RoutedGroup>,
    /// Programs of which the members know each other's offsets.
    exchanged_programs: BTreeSet<usize>,
    placement: MeshRank,
    /// The place of this rank among those of its process, if they are threads.
    thread_rank: Option<ThreadRank>,
}

#[derive(Debug)]
struct RoutedGroup {
    route: CommRoute,
    /// The kind and the digest of the id by which the members joined, such as `NCCL id 0af3…`; `None` for a group of one.
    shared_id: Option<String>,
    group: CollectiveGroup,
    /// By program and op: the offsets of every member's operand and of its result in that member's
    /// exchange memory.
    peer_offsets: BTreeMap<(usize, usize), (Vec<u64>, Vec<u64>)>,
}

/// Thread blocks of a copy kernel, enough to saturate the links: with 16 MiB per peer, 32 blocks
/// reach 220 GB/s and 8 blocks half of that.
const MAX_COPY_BLOCKS: u32 = 32;

/// Page size of exchange memory: memory shared between processes consists of whole pages.
pub(super) const PAGE_BYTES: usize = 2 << 20;

/// Longest time that an abort thread waits for NCCL to abort one communicator.
const NCCL_ABORT_TIMEOUT: Duration = Duration::from_secs(2);

impl RoutedGroup {
    /// Exchanges the offsets of the operand and the result of each given op of a program.
    fn exchange_offsets(&mut self, program: usize, wanted: &[(usize, u64, u64)]) -> CudaResult<()> {
        // Tables of unequal lengths cannot be exchanged, so the members compare the lengths first.
        let counts: Vec<u64> =
            self.group.exchange_table(&[wanted.len() as u64])?.into_iter().flatten().collect();
        if counts.iter().any(|n| *n != wanted.len() as u64) {
            return cuda_failure(format!("the members run programs with {counts:?} collectives"));
        }
        let own_offsets: Vec<u64> = wanted.iter().flat_map(|(_, a, b)| [*a, *b]).collect();
        let all = self.group.exchange_table(&own_offsets)?;
        for (k, (op, ..)) in wanted.iter().enumerate() {
            let member_offsets =
                |at: usize| all.iter().map(|w| w.get(2 * k + at).copied().unwrap_or(NO_OFFSET)).collect();
            self.peer_offsets.insert((program, *op), (member_offsets(0), member_offsets(1)));
        }
        Ok(())
    }
}

impl CommGroups {
    /// Connects to the members of each communicator, one communicator after another.
    pub(super) fn join_all(
        libraries: &Libraries,
        compiler: &mut Compiler,
        mesh_rank: MeshRank,
        ends: Vec<CommunicatorMember>,
        options: &CudaOptions,
    ) -> CudaResult<CommGroups> {
        let abort = Arc::new(AtomicBool::new(false));
        let terms = GroupConfig {
            transport: GroupTransport::Best,
            max_blocks: MAX_COPY_BLOCKS,
            peer_timeout: options.peer_timeout,
            setup_timeout: options.setup_timeout,
            host_id: options.host_id,
            staging_bytes: [0; 2],
        };
        let mut out = Vec::new();
        for e in ends {
            let (rendezvous, kind) = match &options.thread_rank {
                Some(own) => (Rendezvous::Threads(Arc::clone(&own.ranks), e.id), "id in this process"),
                None => (Rendezvous::Nccl(e.id), "NCCL id"),
            };
            let group = CollectiveGroup::join_members(
                libraries,
                compiler,
                &rendezvous,
                (e.member, e.member_count),
                terms,
                Arc::clone(&abort),
            )
            .map_err(|why| CudaError(format!("communicator {}: {why}", e.route)))?;
            let digest = || format!("{kind} {}", &blake3::hash(&e.id.0).to_hex()[..16]);
            let shared_id = (e.member_count > 1).then(digest);
            out.push(RoutedGroup { route: e.route, shared_id, group, peer_offsets: BTreeMap::new() });
        }
        Ok(CommGroups {
            routed_groups: out,
            exchanged_programs: BTreeSet::new(),
            placement: mesh_rank,
            thread_rank: options.thread_rank.clone(),
        })
    }

    /// Returns the communicators in the order in which this rank joined them. Whether a program requests NCCL is known
    /// once the memory is shared.
    pub(super) fn list_joined(&self) -> Vec<JoinedCommunicator> {
        let describe = |e: &RoutedGroup| JoinedCommunicator {
            route: e.route,
            shared: e.shared_id.clone(),
            transport: match e.group.p2p_failure() {
                Some(why) => UsedTransport::Nccl(why.to_string()),
                None if e.group.nccl_is_requested() => {
                    UsedTransport::Nccl("a program requests NCCL".to_string())
                }
                None => UsedTransport::PeerMemory,
            },
        };
        self.routed_groups.iter().map(describe).collect()
    }

    /// Returns whether any communicator uses NCCL, which connects on the first use of each
    /// collective and may be captured only after that.
    pub(super) fn has_lazy_connections(&self) -> bool {
        self.routed_groups.iter().any(|e| e.group.uses_nccl())
    }

    pub(super) fn reset_progress(&self) {
        self.routed_groups.iter().for_each(|e| e.group.reset_progress());
    }

    /// Aborts the work in flight of all communicators. The abort is complete, or has timed out,
    /// once all returned threads have ended. NCCL does not abort a communicator while a graph holds
    /// work of it, so drop those graphs before joining the threads.
    pub(super) fn abort_all(&self) -> Vec<JoinHandle<()>> {
        abort_groups(&self.group_aborters())
    }

    fn group_aborters(&self) -> Vec<GroupAborter> {
        self.routed_groups.iter().map(|e| e.group.new_aborter()).collect()
    }

    /// Never frees the flags of the groups, which a member that does not know of a failure may still write.
    pub(super) fn leak_groups(&mut self) {
        std::mem::forget(std::mem::take(&mut self.routed_groups));
    }

    pub(super) fn abort_handle(&self) -> AbortFn {
        let (aborters, own) = (self.group_aborters(), self.thread_rank.clone());
        // The caller must return promptly and must not wait for a library, so the threads are
        // detached.
        Arc::new(move |_| {
            own.iter().for_each(|own| own.ranks.abort());
            drop(abort_groups(&aborters));
        })
    }

    /// Returns the first fault on the device, expressed as ranks and ops.
    pub(super) fn find_fault(&self, p: &Program) -> Option<Fault> {
        self.routed_groups.iter().find_map(|e| {
            let fault = e.group.find_fault()?;
            let lane = e.route.communicator_of(&self.placement.mesh, self.placement.rank);
            let rank = |member: usize| match lane.as_ref().and_then(|l| l.members.get(member)) {
                Some(r) => format!("rank {r}"),
                None => format!("member {member}"),
            };
            let at = |op: u32| {
                let name = p.ops.get(op as usize).map_or("?", |o| o.opcode.name());
                format!("{name} over {} in @{} (op {op})", e.route, p.name)
            };
            Some(match &fault {
                GroupFault::Mismatch { op, peer, mine, theirs } => Fault::Failed(format!(
                    "{}: {} launched a different collective ({theirs:#010x}, this rank {mine:#010x})",
                    at(*op),
                    rank(*peer)
                )),
                GroupFault::Timeout { op, peers } => {
                    let who: Vec<String> = peers.iter().map(|m| rank(*m)).collect();
                    Fault::Stalled(format!("{}: {} did not arrive in time", at(*op), who.join(", ")))
                }
                GroupFault::Aborted { op } => Fault::Aborted(format!("{}: aborted", at(*op))),
                // Another rank caused the failure and reports the cause.
                GroupFault::Remote(why) => {
                    Fault::Aborted(format!("NCCL over {} in @{}: {why}", e.route, p.name))
                }
                GroupFault::Nccl(why) => {
                    Fault::Failed(format!("NCCL over {} in @{}: {why}", e.route, p.name))
                }
            })
        })
    }

    fn group_index(&self, op: &Op) -> CudaResult<usize> {
        let route = CommRoute::from_op(op);
        let found = self.routed_groups.iter().position(|e| Some(e.route) == route);
        found.ok_or_else(|| CudaError(format!("no communicator for {} {:?}", op.opcode.name(), op.attrs)))
    }
}

impl CudaBackend {
    /// Shares the exchange memory with the other members of every communicator.
    pub(super) fn share_memory(&mut self, memory: &DeviceMemory) -> CudaResult<()> {
        let CudaBackend { groups, programs, placement, .. } = self;
        groups.exchanged_programs.clear();
        for PreparedProgram { program: p, views, .. } in programs {
            for (i, op) in p.collective_ops() {
                // A collective that no communicator of the plan can run reserves nothing: its
                // program fails before the launch.
                if let Ok(lane) = groups.group_index(op)
                    && let Ok(m) = build_collective(placement, p, i, &views[i])
                {
                    groups.routed_groups[lane].group.reserve_staging(&m);
                }
            }
        }
        for lane in &mut groups.routed_groups {
            lane.group.share_memory(memory)?;
            if lane.route.peer.is_some() {
                lane.group.connect_nccl()?;
            }
            lane.peer_offsets.clear();
        }
        Ok(())
    }

    /// Exchanges the offsets of a program's operands and results with the members of every
    /// communicator that the program uses, once for each placement of the slots. Every member runs the same phase, so
    /// every member exchanges in the same order. The observer has accepted the program's
    /// collectives before; a program that differs nevertheless fails here, and not by a wrong
    /// address.
    pub(super) fn exchange_offsets(&mut self, program: usize) -> CudaResult<()> {
        let prepared = &self.programs[program];
        let Some(slots) = &self.slot_memory else {
            return cuda_failure("no memory for temporaries");
        };
        if !self.groups.exchanged_programs.insert(program) {
            return Ok(());
        }
        let p = &prepared.program;
        let offset_of = |v: Option<ValueId>| match v.map(|v| prepared.locations[v.0 as usize]) {
            Some(ValueLocation::Slot(s)) => prepared.slot_offsets[s],
            _ => NO_OFFSET,
        };
        let scratch = slots.scratch_offset;
        let mut wanted: Vec<Vec<(usize, u64, u64)>> = vec![Vec::new(); self.groups.routed_groups.len()];
        for (i, op) in p.collective_ops() {
            let operand = || match prepared.reduced_operands.get(&i) {
                Some(copy) => scratch + copy,
                None => offset_of(op.operands.first().copied()),
            };
            let (operand, result) = match prepared.wire_words.get(&i) {
                Some(words) => (scratch + words.sent, scratch + words.received),
                None => (operand(), offset_of(p.collective_result(op))),
            };
            wanted[self.groups.group_index(op)?].push((i, operand, result));
        }
        let lanes = self.groups.routed_groups.iter_mut().zip(wanted);
        for (lane, wanted) in lanes.filter(|(_, wanted)| !wanted.is_empty()) {
            lane.exchange_offsets(program, &wanted)
                .map_err(|e| CudaError(format!("@{} over {}: {}", p.name, lane.route, e.0)))?;
        }
        Ok(())
    }

    /// Enqueues a collective with its opening and closing synchronization. DMA copy engines move
    /// the data if the collective is offloaded to them, the group has P2P memory, and the copies
    /// are large enough.
    pub(super) fn launch_collective(
        &mut self,
        program: usize,
        i: usize,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (m, lane) = self.locate_collective(program, i)?;
        let by_engines = self.programs[program].comm_offloads.get(&i) == Some(&CommOffload::CopyEngines)
            && m.suits_copy_engines();
        let group = &mut self.groups.routed_groups[lane].group;
        if !by_engines || group.active_transport() != GroupTransport::P2p {
            // SAFETY: `locate_collective` takes addresses from the backend's memory, which outlives
            // the work on its streams, and sizes from the types of the sealed plan. The plan orders
            // the streams, and all members exchanged their offsets when memory was shared.
            return unsafe { group.enqueue_collective(&m, stream) };
        }
        // SAFETY: as above.
        unsafe { group.enqueue_copies(&m, stream) }
    }

    /// Enqueues one of the synchronizations of a collective whose data the producer stores. Once the
    /// closing one completes, the result is complete.
    pub(super) fn launch_synchronization(
        &self,
        program: usize,
        i: usize,
        which: Synchronization,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (m, lane) = self.locate_collective(program, i)?;
        self.groups.routed_groups[lane].group.synchronize(which, &m, stream)
    }

    /// Returns the destinations to which the producer of a collective's operand stores it; `None`
    /// if that is impossible.
    pub(super) fn store_targets(
        &self,
        program: usize,
        i: usize,
        along: SplitDim,
    ) -> CudaResult<Option<Targets>> {
        let (m, lane) = self.locate_collective(program, i)?;
        self.groups.routed_groups[lane].group.store_targets(&m, along)
    }

    /// Returns a collective with its addresses, and the index of its communicator.
    fn locate_collective(&self, program: usize, i: usize) -> CudaResult<(GroupCollective, usize)> {
        let PreparedProgram { program: p, views, .. } = &self.programs[program];
        let op = &p.ops[i];
        let mut m = build_collective(&self.placement, p, i, &views[i])?;
        (m.operand, m.result) = match self.wire_addresses(program, i)? {
            Some([sent, received]) => (sent, received),
            None => (
                self.operand_address(program, i)?,
                p.collective_result(op).map_or(Ok(0), |v| self.value_address(program, v))?,
            ),
        };
        let lane = self.groups.group_index(op)?;
        if let Some((operands, results)) = self.groups.routed_groups[lane].peer_offsets.get(&(program, i)) {
            (m.peer_operand_offsets, m.peer_result_offsets) = (operands.clone(), results.clone());
        }
        Ok((m, lane))
    }
}

/// Builds the description of a collective, without addresses.
fn build_collective(
    placement: &MeshRank,
    p: &Program,
    i: usize,
    view: &OpView,
) -> CudaResult<GroupCollective> {
    let op = &p.ops[i];
    let (OpByKind::Collective(collective), Some(route)) = (view.by_kind(), CommRoute::from_op(op)) else {
        return cuda_failure("a collective without a communicator");
    };
    check_collective(op, collective)?;
    let lane = route.communicator_of(&placement.mesh, placement.rank);
    let members = lane.map_or(1, |l| l.members.len());
    let me = member_index(route, placement);
    let operand = op.operands.first().map(|v| p.type_of(*v));
    let out = p.collective_result(op).map(|v| p.type_of(v));
    let Some(ty) = operand.or(out) else {
        return cuda_failure("a collective without operand and result");
    };
    let element = ty.dtype.element_bytes() as usize;
    let shards = |ty: &Type, axis: CommAxis| match axis {
        CommAxis::Axis(axis) => Ok(shard_ranges(ty, axis, members as u32)),
        // The verifier refuses shards over the world, so only a program that a drill has changed
        // comes here: its shards are those of the axis that shards the value.
        CommAxis::World => {
            let shards = |a: &Axis| matches!(ty.layout.on_axis(*a), AxisLayout::Shard(_));
            match p.mesh.active_axes().find(shards) {
                Some(axis) => Ok(shard_ranges(ty, axis, members as u32)),
                None => cuda_failure("a collective over shards of a value that no axis shards"),
            }
        }
    };
    let both = || {
        let missing = || CudaError(format!("{} without operand or result", op.opcode.name()));
        operand.zip(out).ok_or_else(missing)
    };
    let bytes = ty.byte_size().0 as usize;
    let kind = match collective {
        CollectiveOp::AllReduce(v) => {
            CollectiveKind::AllReduce { elements: ty.element_count() as usize, reduction: v.reduction }
        }
        CollectiveOp::AllGather(v) => {
            let (x, y) = both()?;
            let (dim, parts) = shards(x, v.axis)?;
            CollectiveKind::all_gather(me, as_matrix(&y.shape, dim), dim.min(1), &parts, element)
        }
        CollectiveOp::ReduceScatter(v) => {
            let (x, y) = both()?;
            let (dim, parts) = shards(y, v.axis)?;
            let (rows, columns) = as_matrix(&x.shape, dim);
            let (dim, reduction) = (dim.min(1), v.reduction);
            CollectiveKind::ReduceScatter { rows, columns, dim, parts, reduction }
        }
        CollectiveOp::AllToAll(v) => build_all_to_all(me, v, both()?, &shards)?,
        CollectiveOp::HaloExchange(v) => {
            let (x, _) = both()?;
            build_halo_exchange(me, x, shards(x, v.axis)?)?
        }
        CollectiveOp::Broadcast(v) => CollectiveKind::broadcast_from(me, members, v.root as usize, bytes),
        CollectiveOp::Send(_) | CollectiveOp::Recv(_) => CollectiveKind::send_recv(me, bytes),
    };
    let digest = blake3::hash(collective_signature(p, op).as_bytes());
    let bytes = digest.as_bytes();
    Ok(GroupCollective {
        kind,
        dtype: ty.dtype,
        operand: 0,
        result: 0,
        peer_operand_offsets: Vec::new(),
        peer_result_offsets: Vec::new(),
        fingerprint: u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        op_index: i as u32,
        transport: op.requested_transport(),
    })
}

/// The dim over which a value is sharded, and the part of each member in elements of its matrix.
type ShardParts = (usize, Vec<Range<usize>>);

/// Builds the copies of an exchange of x that returns y.
fn build_all_to_all(
    me: usize,
    v: &views::AllToAll,
    (x, y): (&Type, &Type),
    shards: &dyn Fn(&Type, CommAxis) -> CudaResult<ShardParts>,
) -> CudaResult<CollectiveKind> {
    // Words take the place of the elements of a row.
    let on_wire = |ty: &Type| if v.wire.is_some() { type_on_wire(ty) } else { ty.clone() };
    let (x, y) = (on_wire(x), on_wire(y));
    let ((dim, concat), (_, split)) = (shards(&x, v.axis)?, shards(&y, v.axis)?);
    let whole = as_matrix(&exchanged_shape(&x, &y), 1);
    let element = x.dtype.element_bytes() as usize;
    Ok(CollectiveKind::all_to_all(me, whole, dim, &concat, &split, element))
}

/// Builds the copies of a halo exchange of frames x, of whose dim 1 the members hold these parts, in elements
/// of a frame.
fn build_halo_exchange(me: usize, x: &Type, (dim, parts): ShardParts) -> CudaResult<CollectiveKind> {
    let (1, [frames, _, columns, channels]) = (dim, &x.shape[..]) else {
        return cuda_failure(format!("a halo exchange over dim {dim} of {:?}", x.shape));
    };
    let row = (columns * channels) as usize;
    let rows: Vec<usize> = parts.iter().map(|part| part.len() / row.max(1)).collect();
    let row_bytes = row * x.dtype.element_bytes() as usize;
    Ok(CollectiveKind::halo_exchange(me, &rows, *frames as usize, row_bytes))
}

/// Fails with the reason if this backend does not support a collective.
pub(super) fn check_collective(op: &Op, collective: CollectiveOp<'_>) -> CudaResult<()> {
    // Issues of a batch are in flight together. A blocking op would delay the rest of its batch and
    // could deadlock.
    if op.batch_number().is_some() && !op.issue {
        return cuda_failure("a blocking send or receive in a batch");
    }
    match collective {
        // The dims behind these two are the columns of a matrix.
        CollectiveOp::AllToAll(v) if v.split > 1 || v.concat > 1 => {
            cuda_failure("an exchange of shards of another dim than the first two")
        }
        _ => Ok(()),
    }
}

/// Reports the progress of collectives to an observer: each completion once, in program order
/// within a communicator.
#[derive(Debug)]
pub(super) struct ProgressReporter<'a> {
    program: &'a Program,
    /// The collectives whose completion has not been reported, in program order.
    pending: Vec<(usize, CommRoute)>,
    /// Progress of the device: twice the index of the furthest op, plus 1 if the op started or plus
    /// 2 if it completed.
    furthest_progress: u64,
}

impl<'a> ProgressReporter<'a> {
    pub(super) fn new(program: &'a Program) -> ProgressReporter<'a> {
        let pending = program.collective_ops().filter_map(|(i, op)| Some((i, CommRoute::from_op(op)?)));
        ProgressReporter { program, pending: pending.collect(), furthest_progress: 0 }
    }

    /// Reports new progress and returns whether there was any.
    pub(super) fn report_progress(&mut self, groups: &CommGroups, observer: &mut dyn Observer) -> bool {
        let mut changed = false;
        for e in &groups.routed_groups {
            let DeviceProgress { started, completed } = e.group.read_progress();
            // Progress only grows, however far the communicators are apart.
            let started = started.map_or(0, |op| 2 * u64::from(op) + 1);
            let progress = started.max(completed.map_or(0, |op| 2 * u64::from(op) + 2));
            if progress > self.furthest_progress {
                self.furthest_progress = progress;
                observer.on_progress((progress / 2) as u32);
                changed = true;
            }
            self.pending.retain(|(i, route)| {
                let is_done = *route == e.route && completed.is_some_and(|op| *i <= op as usize);
                if is_done {
                    observer.on_completed(*i);
                    changed = true;
                }
                !is_done
            });
        }
        changed
    }

    /// Reports completion of everything that remains, once the device is done.
    pub(super) fn report_completion(&mut self, observer: &mut dyn Observer) {
        self.pending.drain(..).for_each(|(i, _)| observer.on_completed(i));
        observer.on_progress(self.program.ops.len() as u32);
    }
}

/// Aborts all waits at once. NCCL aborts run on one thread per communicator, because aborting one
/// communicator may wait for the kernel of another. Whatever NCCL does not abort in time ends with
/// the process.
fn abort_groups(aborters: &[GroupAborter]) -> Vec<JoinHandle<()>> {
    aborters.iter().for_each(GroupAborter::stop);
    let through_nccl = aborters.iter().filter(|a| a.uses_nccl()).cloned();
    let ended = |a: GroupAborter| {
        let end = move || {
            a.abort_within(NCCL_ABORT_TIMEOUT);
        };
        std::thread::Builder::new().name("nccl-abort".into()).spawn(end).ok()
    };
    through_nccl.filter_map(ended).collect()
}

/// Returns the index of the rank among the members of a communicator.
fn member_index(route: CommRoute, mesh_rank: &MeshRank) -> usize {
    let lane = route.communicator_of(&mesh_rank.mesh, mesh_rank.rank);
    lane.and_then(|l| l.members.iter().position(|r| *r == mesh_rank.rank)).unwrap_or(0)
}
