//! Runs programs on backends, one thread per rank, and comes back whatever they do.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_device::{Abort, Backend, CallData, Fault, Observer, Scalar, Seat, T0801, T0802, WeightSource};
use tessera_ir::{Opcode, Program, Type};
use tessera_mesh::Mesh;
use tessera_reference::{Arg, Machine, Tensor};

use super::Maker;
use crate::own_slots;

/// What one rank is given to do.
pub(super) struct Work {
    pub(super) programs: Vec<Arc<Program>>,
    /// Tensors by input name.
    pub(super) inputs: BTreeMap<String, Vec<f32>>,
    pub(super) scalars: BTreeMap<String, Scalar>,
}

/// Outputs of each program.
pub(super) type Outputs = Vec<BTreeMap<String, Vec<f32>>>;

/// How one rank ended.
pub(super) enum End {
    Done(Outputs),
    Fault(Fault),
    Panicked(String),
    /// It did not come back.
    Hangs,
}

enum News {
    Loaded(Result<Abort, Diagnostic>),
    Ended(usize, End),
}

/// Loads on every rank and, where all could, runs.
///
/// # Errors
/// The first diagnostic of a load, or words for a backend that could not be made.
pub(super) fn drive<B: Backend + 'static>(
    mesh: Mesh,
    makers: Vec<Maker<B>>,
    work: Vec<Work>,
    weights: &Arc<Machine>,
    limit: Duration,
) -> Result<Vec<End>, Diagnostic> {
    let (tell, news) = channel();
    let mut go = Vec::new();
    let ranks = work.len();
    for ((rank, maker), work) in mesh.iter().zip(makers).zip(work) {
        let (send, start) = channel();
        go.push(send);
        let (tell, weights) = (tell.clone(), Arc::clone(weights));
        // Not joined: a rank that hangs must not hang the suite.
        std::thread::spawn(move || rank_main(Seat { mesh, rank }, maker, &work, &weights, &tell, &start));
    }
    drop(tell);
    let until = Instant::now() + limit;
    let mut ends: Vec<Option<End>> = (0..ranks).map(|_| None).collect();
    let mut aborts: Vec<Abort> = Vec::new();
    let mut loaded = 0;
    while ends.iter().any(Option::is_none) {
        match news.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(News::Loaded(Err(d))) => return Err(d),
            Ok(News::Loaded(Ok(abort))) => {
                aborts.push(abort);
                loaded += 1;
                if loaded == ranks {
                    // A rank that has gone already said so.
                    go.iter().for_each(|g| {
                        let _ = g.send(());
                    });
                }
            }
            Ok(News::Ended(rank, end)) => {
                if !matches!(end, End::Done(_)) {
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
    Ok(ends.into_iter().map(|e| e.unwrap_or(End::Hangs)).collect())
}

fn rank_main<B: Backend>(
    seat: Seat,
    maker: Maker<B>,
    work: &Work,
    weights: &Machine,
    tell: &Sender<News>,
    start: &Receiver<()>,
) {
    let rank = seat.rank.0 as usize;
    let end = catch_unwind(AssertUnwindSafe(|| {
        let mut backend = match maker(seat) {
            Ok(b) => b,
            Err(why) => return Err(Diagnostic::error(&T0802, format!("no backend for rank {rank}: {why}"))),
        };
        let mut source = FromReference { machine: weights };
        let mut loaded = Vec::new();
        for p in &work.programs {
            loaded.push(backend.load(p, &own_slots(p), &mut source)?);
        }
        // The suite hangs up when another rank could not load, or when it has waited enough.
        let _ = tell.send(News::Loaded(Ok(backend.abort())));
        if start.recv().is_err() {
            return Ok(End::Fault(Fault::Aborted("another rank refused".to_string())));
        }
        let call = CallData {
            scalars: work.scalars.iter().map(|(k, v)| (k.as_str(), v.clone())).collect(),
            inputs: work.inputs.iter().map(|(k, v)| (k.as_str(), v.as_slice())).collect(),
        };
        let mut outputs = Outputs::new();
        for (program, p) in loaded.into_iter().zip(&work.programs) {
            if let Err(fault) = backend.run(program, &call, &mut Nobody) {
                return Ok(End::Fault(fault));
            }
            let names = p.ops.iter().filter(|o| o.opcode == Opcode::Output).filter_map(|o| o.name.as_deref());
            let read = |n: &str| Some((n.to_string(), backend.output(n)?.to_vec()));
            outputs.push(names.filter_map(read).collect());
        }
        Ok(End::Done(outputs))
    }));
    let news = match end {
        Ok(Ok(end)) => News::Ended(rank, end),
        Ok(Err(refused)) => News::Loaded(Err(refused)),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no words");
            News::Ended(rank, End::Panicked(words.to_string()))
        }
    };
    let _ = tell.send(news);
}

/// Weights as the reference cuts them.
struct FromReference<'a> {
    machine: &'a Machine,
}

impl WeightSource for FromReference<'_> {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &Seat,
    ) -> Result<Vec<f32>, Diagnostic> {
        let piece = self.machine.weight(name, ty, load, seat.coord());
        piece.map(|t| rounded(&t)).map_err(|why| Diagnostic::error(&T0802, why))
    }
}

/// Elements in the precision of a backend.
pub(super) fn rounded(t: &Tensor) -> Vec<f32> {
    t.data().iter().map(|x| *x as f32).collect()
}

/// A scalar of the reference as a backend takes it.
pub(super) fn scalar(arg: &Arg) -> Scalar {
    match arg {
        Arg::Int(i) => Scalar::I64(*i),
        Arg::Float(t) if t.shape().is_empty() => Scalar::F32(t.data()[0] as f32),
        Arg::Float(t) => Scalar::F32s(rounded(t)),
    }
}

/// Whether a load was refused as beyond the backend.
pub(super) fn is_refusal(d: &Diagnostic) -> bool {
    d.code.id == T0801.id
}

struct Nobody;

impl Observer for Nobody {
    fn issued(&mut self, _: usize) {}
    fn progress(&mut self, _: u32) {}
}
