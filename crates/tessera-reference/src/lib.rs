//! The meaning of every op: programs of all ranks of a mesh, evaluated in lockstep, in f64, without any care
//! for speed.
//!
//! What this evaluator says is what an op means; backends and lowerings are compared with it. It therefore
//! shares no code with the shape and shard rules or with any backend, computes every result's shape from the
//! operands at hand and refuses a program whose written types say otherwise. It rounds where an op says so; elsewhere
//! dtypes are names here. Ranks outside the mesh run programs of their own, on whole values. Streams and events order nothing either, since each rank runs its ops in program order; that
//! a program is right under every legal order is for the judge to show.
//!
//! ```
//! use tessera_reference::{Call, Machine, Tensor};
//!
//! let text = "program @double { %x = input : f32[2] %y = toperator.add %x, %x output \"y\", %y }";
//! let program = tessera_ir::parse(text, "double").unwrap();
//! let call = Call::default().input("x", Tensor::new(&[2], vec![1.0, 10.0]));
//! let out = Machine::new(program.mesh).run(&[&program], &call).unwrap();
//! assert_eq!(out[0]["y"].data(), [2.0, 20.0]);
//! ```

mod compute;
mod exchange;
mod fault;
mod machine;
mod round;
mod tensor;
mod tile;

pub use fault::Fault;
pub use machine::{Arg, Call, Feed, Machine};
pub use round::{Rounding, rounding};
pub use tensor::Tensor;
