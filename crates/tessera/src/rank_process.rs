//! The process of one rank: it joins the run, verifies the plan again, loads and runs; the leader
//! also closes the record.

use std::sync::Arc;

use tessera_base::{Diagnostic, DiagnosticFormat, Diagnostics, render_all};
use tessera_mesh::Rank;
use tessera_runtime::driver::{JoinedRank, exit_process, exit_without_handlers, join_launch};
use tessera_runtime::{Failure, FailureClass};
use tessera_verify::SealedPlan;

use crate::arrays::{ArrayConfig, ArrayPlan, meet_ranks, run_array_leader, setup_leader};
use crate::codes::T0012;
use crate::generate::{GenerateConfig, LanguagePlan, run_text_leader};
use crate::plan::Plan;
use crate::rank::{RankContext, RankPlan, RankSetup, report_refusal, run_as_leader, run_follower};
use crate::rank_config::RankConfig;
use crate::rank_orders::RankOrders;
use crate::synthetic_delays::SyntheticDelays;
use crate::terminal::{print_stderr, print_stderr_line};

/// Runs one rank to its end and returns the exit status of its process. `on_joined` is called once
/// the rank holds its links; from then on the launcher handles the first interrupt.
#[must_use]
pub fn rank_main(on_joined: impl FnOnce()) -> i32 {
    let joined = match join_launch() {
        Ok(j) => j,
        Err(d) => return print_diagnostics(&[d]),
    };
    on_joined();
    let orders: RankOrders = match serde_json::from_slice(&joined.welcome.payload) {
        Ok(o) => o,
        Err(e) => {
            print_stderr_line(&format!("tessera rank: the launcher's configuration cannot be parsed: {e}"));
            return FailureClass::Parity.exit_code();
        }
    };
    let rank = Rank(joined.welcome.rank);
    let (outcome, uses_gpus) = match orders {
        RankOrders::Stream(orders) => (run_stream_rank(joined, &orders, rank), orders.gpus.is_some()),
        RankOrders::Generate(config) => (run_text_rank(joined, &config, rank), config.gpus.is_some()),
        RankOrders::Arrays(config) => (run_array_rank(joined, &config, rank), config.gpus.is_some()),
    };
    // Exit handlers of the GPU libraries would wait for work that never ends.
    let exit_process = if uses_gpus { exit_without_handlers } else { exit_process };
    match outcome {
        // After a clean run the GPU libraries' exit handlers may run, however long they take.
        Ok(None) if uses_gpus => exit_process(0),
        Ok(None) => 0,
        // The launcher prints the cause once. The leader prints it only if the launcher is gone.
        Ok(Some(f)) => {
            if rank.0 == 0 && f.class == FailureClass::LauncherGone {
                print_stderr_line(&format!("tessera: {}: {} ({})", f.class.as_str(), f.text, f.code));
            }
            exit_process(f.class.exit_code())
        }
        Err(ds) => print_diagnostics(&ds),
    }
}

fn print_diagnostics(ds: &[Diagnostic]) -> i32 {
    print_stderr(&render_all(ds, DiagnosticFormat::Text, &|_| None));
    FailureClass::Preflight.exit_code()
}

fn run_stream_rank(
    mut joined: JoinedRank,
    orders: &RankConfig,
    rank: Rank,
) -> Result<Option<Failure>, Diagnostics> {
    let plan = Plan::read(&orders.plan).and_then(|plan| check_digest(plan, &orders.digest));
    let plan = match plan {
        Ok(plan) => plan,
        Err(ds) => return report_refusal(&mut joined, ds).map(Some),
    };
    let of_leader =
        orders.outputs.pipes.len() + usize::from(orders.is_steered) + usize::from(orders.is_fed());
    let pipes = if rank.0 == 0 { of_leader } else { 0 };
    let setup = set_up(joined, pipes, RankContext::new(plan, orders.delays));
    match rank.0 {
        0 => run_as_leader(|| Ok(setup), orders),
        _ => run_follower(|| Ok(setup), &orders.settings(), orders.weights_place(), rank),
    }
}

fn run_text_rank(
    mut joined: JoinedRank,
    config: &GenerateConfig,
    rank: Rank,
) -> Result<Option<Failure>, Diagnostics> {
    let plan = LanguagePlan::read(&config.plan).and_then(|plan| check_digest(plan, &config.digest));
    let plan = match plan {
        Ok(plan) => plan,
        Err(ds) => return report_refusal(&mut joined, ds).map(Some),
    };
    let setup = set_up(joined, 0, RankContext::new(plan, SyntheticDelays::default()));
    match rank.0 {
        0 => run_text_leader(|| Ok(setup), config),
        _ => run_follower(|| Ok(setup), &config.settings(), config.weights.clone(), rank),
    }
}

fn run_array_rank(
    mut joined: JoinedRank,
    config: &ArrayConfig,
    rank: Rank,
) -> Result<Option<Failure>, Diagnostics> {
    let plan = ArrayPlan::read(&config.plan).and_then(|plan| check_digest(plan, &config.digest));
    let plan = match plan {
        Ok(plan) => plan,
        Err(ds) => return report_refusal(&mut joined, ds).map(Some),
    };
    if let Some(rendezvous) = &config.rendezvous {
        return match meet_ranks(&plan, (0, config.device()), rendezvous, Some(&config.join_orders())) {
            Ok(met) => run_array_leader(|| Ok(setup_leader(joined, plan, met)), config),
            Err(ds) => report_refusal(&mut joined, ds).map(Some),
        };
    }
    let sockets = usize::from(rank.0 == 0);
    let setup = set_up(joined, sockets, RankContext::new(plan, SyntheticDelays::default()));
    match rank.0 {
        0 => run_array_leader(|| Ok(setup), config),
        _ => run_follower(|| Ok(setup), &config.settings(), config.weights_place(), rank),
    }
}

/// Builds the setup of a launched rank. The launcher attached the descriptors of the communicators, and behind
/// them this number of pipes for frames and of sockets to the launching process.
fn set_up<P: RankPlan>(mut joined: JoinedRank, pipes: usize, context: RankContext<P>) -> RankSetup<P> {
    let mut fds = std::mem::take(&mut joined.extra_fds);
    let frame_pipes = fds.split_off(fds.len().saturating_sub(pipes));
    RankSetup { joined, communicators: fds.into(), context, frame_pipes, interrupt: None, on_event: None }
}

/// Checks that the plan which this rank read is the launcher's.
fn check_digest<P: RankPlan>(plan: P, expected: &str) -> Result<Arc<P>, Diagnostics> {
    let found = SealedPlan::digest_hex(plan.sealed());
    if found == expected {
        return Ok(Arc::new(plan));
    }
    Err(vec![
        Diagnostic::error(&T0012, "this rank reads another plan than the launcher")
            .with_label("launcher", format!("digest {expected}"))
            .with_label("this rank", format!("digest {found}")),
    ])
}
