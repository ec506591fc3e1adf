//! Runs programs on backends, one thread per rank, and always returns within a time limit.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_device::{
    AbortFn, Backend, CallData, Fault, LoadedProgram, MeshRank, NoObserver, Scalar, T0801, T0802,
    WeightSource,
};
use tessera_ir::{Opcode, Program, Type, WeightLoad};
use tessera_mesh::Mesh;
use tessera_reference::{CallScalar, Evaluator, Tensor};

use super::BackendFactory;
use crate::dedicated_slots;

/// What one rank runs in a conformance test: its programs in order, and the inputs and scalars that
/// they read.
pub(super) struct RankWork {
    pub(super) programs: Vec<Arc<Program>>,
    /// This rank's shards of the input tensors, by the unique name that its programs read.
    pub(super) inputs: BTreeMap<String, Vec<f32>>,
    pub(super) scalars: BTreeMap<String, Scalar>,
}

/// Output values by name, one map per program in the order of [`RankWork::programs`].
pub(super) type ProgramOutputs = Vec<BTreeMap<String, Vec<f32>>>;

/// How a rank's run ended: with outputs, with a fault of the backend, by a panic, or not in time.
pub(super) enum RankEnd {
    Done(ProgramOutputs),
    Fault(Fault),
    Panicked(String),
    /// The rank did not return in time.
    Hangs,
}

enum RankEvent {
    Loaded(Result<AbortFn, Diagnostic>),
    Ended(usize, RankEnd),
}

/// Loads the programs on every rank and, if all ranks succeed, runs them.
///
/// # Errors
/// The first diagnostic of a load, or a diagnostic for a backend that could not be created.
pub(super) fn run_ranks<B: Backend + 'static>(
    mesh: Mesh,
    makers: Vec<BackendFactory<B>>,
    work: Vec<RankWork>,
    weights: &Arc<Evaluator>,
    limit: Duration,
) -> Result<Vec<RankEnd>, Diagnostic> {
    let (event_sender, events) = channel();
    let mut start_senders = Vec::new();
    let ranks = work.len();
    for ((rank, maker), work) in mesh.iter().zip(makers).zip(work) {
        let (send, start) = channel();
        start_senders.push(send);
        let (event_sender, weights) = (event_sender.clone(), Arc::clone(weights));
        // The thread is not joined: a rank that hangs must not hang the suite.
        std::thread::spawn(move || {
            rank_main(MeshRank { mesh, rank }, maker, &work, &weights, &event_sender, &start)
        });
    }
    drop(event_sender);
    let until = Instant::now() + limit;
    let mut ends: Vec<Option<RankEnd>> = (0..ranks).map(|_| None).collect();
    let mut aborts: Vec<AbortFn> = Vec::new();
    let mut loaded = 0;
    while ends.iter().any(Option::is_none) {
        match events.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(RankEvent::Loaded(Err(d))) => return Err(d),
            Ok(RankEvent::Loaded(Ok(abort))) => {
                aborts.push(abort);
                loaded += 1;
                if loaded == ranks {
                    // A rank that has ended has already reported its result.
                    start_senders.iter().for_each(|g| {
                        let _ = g.send(());
                    });
                }
            }
            Ok(RankEvent::Ended(rank, end)) => {
                if !matches!(end, RankEnd::Done(_)) {
                    aborts.iter().for_each(|abort| abort(&format!("rank {rank} failed")));
                }
                ends[rank] = Some(end);
                if loaded < ranks {
                    break;
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(ends.into_iter().map(|e| e.unwrap_or(RankEnd::Hangs)).collect())
}

fn rank_main<B: Backend>(
    seat: MeshRank,
    maker: BackendFactory<B>,
    work: &RankWork,
    weights: &Evaluator,
    event_sender: &Sender<RankEvent>,
    start: &Receiver<()>,
) {
    let rank = seat.rank.0 as usize;
    let end = catch_unwind(AssertUnwindSafe(|| {
        let mut backend = match maker(seat) {
            Ok(b) => b,
            Err(why) => return Err(Diagnostic::error(&T0802, format!("no backend for rank {rank}: {why}"))),
        };
        let mut source = ReferenceWeights(weights);
        let mut loaded = Vec::new();
        for p in &work.programs {
            // Programs of plans are captured, so those of the suite are too.
            let mut captured = Program::clone(p);
            captured.capture_into(&p.name);
            let declared = captured.captured_graph().ok().flatten();
            let handle = backend.load(&Arc::new(captured), &dedicated_slots(p), &mut source)?;
            let reported = LoadedProgram { name: p.name.clone(), graph: declared };
            if backend.loaded_programs().last() != Some(&reported) {
                let what = format!("@{}: the backend does not report the program and its graph", p.name);
                return Err(Diagnostic::error(&T0802, what));
            }
            loaded.push(handle);
        }
        // The suite drops its end of the channel if another rank could not load or the time is up.
        let _ = event_sender.send(RankEvent::Loaded(Ok(backend.abort_fn())));
        if start.recv().is_err() {
            return Ok(RankEnd::Fault(Fault::Aborted("another rank rejected its programs".to_string())));
        }
        let call = CallData {
            scalars: work.scalars.iter().map(|(k, v)| (k.as_str(), v.clone())).collect(),
            inputs: work.inputs.iter().map(|(k, v)| (k.as_str(), v.as_slice())).collect(),
        };
        let mut outputs = ProgramOutputs::new();
        for (program, p) in loaded.into_iter().zip(&work.programs) {
            if let Err(fault) = backend.run(program, &call, &mut NoObserver) {
                return Ok(RankEnd::Fault(fault));
            }
            let names = p.ops.iter().filter(|o| o.opcode == Opcode::Output).filter_map(|o| o.name.as_deref());
            let read = |n: &str| Some((n.to_string(), backend.output(n)?.to_vec()));
            outputs.push(names.filter_map(read).collect());
        }
        Ok(RankEnd::Done(outputs))
    }));
    let news = match end {
        Ok(Ok(end)) => RankEvent::Ended(rank, end),
        Ok(Err(refused)) => RankEvent::Loaded(Err(refused)),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            RankEvent::Ended(rank, RankEnd::Panicked(words.to_string()))
        }
    };
    let _ = event_sender.send(news);
}

/// Provides the weights of an evaluator with the reference's sharding.
#[derive(Debug)]
pub struct ReferenceWeights<'a>(pub &'a Evaluator);

impl WeightSource for ReferenceWeights<'_> {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        let parse =
            |load| WeightLoad::parse(load).ok_or_else(|| format!("unknown transformation load = \"{load}\""));
        let piece = load.map(parse).transpose();
        let piece = piece.and_then(|load| self.0.weight_value(name, ty, load, seat.coord()));
        piece.map(|t| to_f32(&t)).map_err(|why| Diagnostic::error(&T0802, why))
    }
}

/// Converts elements to a backend's precision.
pub(super) fn to_f32(t: &Tensor) -> Vec<f32> {
    t.data().iter().map(|x| *x as f32).collect()
}

/// Converts a scalar of the reference to a backend's type.
pub(super) fn to_scalar(arg: &CallScalar) -> Scalar {
    match arg {
        CallScalar::Int(i) => Scalar::I64(*i),
        CallScalar::Float(t) if t.shape().is_empty() => Scalar::F32(t.data()[0] as f32),
        CallScalar::Float(t) => Scalar::F32s(to_f32(t)),
    }
}

/// Returns whether a backend rejected a load as unsupported.
pub(super) fn is_unsupported(d: &Diagnostic) -> bool {
    d.code.id == T0801.id
}
