//! The rank of a run: what it derives from its plan, the engine that it builds, and its part as leader or worker.

mod chunk_requests;
mod context;
mod leader_main;
mod rank_plan;
mod worker_main;

pub(crate) use context::{LeaderEvent, LeaderEventHandler, RankContext, RankSetup, report_refusal};
pub(crate) use leader_main::{LeaderSeat, run_as_leader, run_leader_rank};
pub(crate) use rank_plan::{RankModel, RankPlan};
pub(crate) use worker_main::run_follower;
