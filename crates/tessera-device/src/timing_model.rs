//! The interface of timing models: a simulated backend computes nothing and takes all durations
//! from here.

use tessera_ir::Program;
use tessera_mesh::Mesh;

/// Durations of ops on a machine, in nanoseconds. Implementations are deterministic.
pub trait TimingModel {
    /// Returns the time that an op takes on its own device, 0 if it takes none. For a collective,
    /// this is the work before the rendezvous, such as packing; for a wait, the work after the
    /// result has arrived.
    fn op_ns(&self, program: &Program, op: usize) -> u64;

    /// Returns the time that the host spends on launching an op; 0 if launches cost nothing, for
    /// instance because they are part of a captured graph. The host of a rank launches in program
    /// order from the start of a program.
    fn launch_ns(&self, _program: &Program, _op: usize) -> u64 {
        0
    }

    /// Returns the time of a collective, send or receive, from the arrival of its last member until
    /// every member has the result.
    fn collective_ns(&self, program: &Program, op: usize, mesh: &Mesh) -> u64;

    /// Returns the factor by which compute on a device slows down while a transfer of that device
    /// is in flight; at least 1.
    fn contention_factor(&self) -> f64 {
        1.0
    }
}
