//! What things take: time of ops under an executor's curves, time and bytes of collectives by algorithm, load of
//! experts under a routing, pipelines under a schedule, streams that share a device.
//!
//! This room knows no mapping and searches nothing: it is asked about one arrangement at a time and answers with
//! numbers. Times are `f64` nanoseconds, because they are estimates and are divided.

pub mod knobs;
