//! What a backend that computes nothing must be told: how long things take.

use tessera_ir::Program;
use tessera_mesh::Mesh;

/// What ops take on some machine, in nanoseconds. The same question always has the same answer.
pub trait Prices {
    /// Work of an op on its own device. Of a collective: what it does before it meets its group, such as packing; of a
    /// wait: what it does once the result is there. 0 for what takes no time.
    fn op_ns(&self, program: &Program, op: usize) -> u64;

    /// Time that the host spends on launching an op: 0 where launches cost nothing, for instance because they were
    /// captured. The host of a rank launches in program order from the beginning of a program.
    fn launch_ns(&self, _program: &Program, _op: usize) -> u64 {
        0
    }

    /// Time of a collective, send or receive, from when its last member is there until every member has the result.
    fn collective_ns(&self, program: &Program, op: usize, mesh: &Mesh) -> u64;

    /// How many times longer work on a device takes while a transfer of that device is under way; at least 1.
    fn contention(&self) -> f64 {
        1.0
    }
}
