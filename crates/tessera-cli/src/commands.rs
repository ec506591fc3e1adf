//! The subcommands, one file each: the arguments with their help text, and what they run and print.

pub mod autopsy;
pub mod bench;
pub mod bringup;
pub mod check;
pub mod doctor;
pub mod drill;
pub mod explain;
pub mod generate;
pub mod join;
pub mod launch;
pub mod lint;
pub mod measure;
pub mod models;
pub mod parity;
pub mod plan;
pub mod record;
pub mod serve;
pub mod stream;
pub mod wire;
