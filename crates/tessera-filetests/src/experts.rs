//! One layer of experts whose tokens choose as their logits say, under any mapping, on the ranks of any backend.

#![allow(clippy::unwrap_used, reason = "a layer that cannot be planned or run ends the test that makes it")]

mod draw;
mod layer;
mod run;

pub use draw::draw_layer;
pub use layer::{INNER, Layer, logical_layer, normals, plan_layer};
pub use run::{RankResult, run_calls};
