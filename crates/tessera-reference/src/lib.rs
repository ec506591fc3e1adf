//! The reference semantics of every op: evaluates the programs of all ranks of a mesh in lockstep,
//! in f64, without regard to speed.
//!
//! This evaluator defines the meaning of each op; backends and lowerings are compared with it. It
//! therefore shares no code with the shape and shard rules or with any backend, computes every
//! result's shape from the actual operands, and rejects a program whose annotated types differ. It
//! rounds only in ops that require rounding; elsewhere dtypes have no effect. Ranks outside the
//! mesh run programs of their own, on complete values. Streams and events impose no order either,
//! since each rank runs its ops in program order; the verifier shows that a program is correct
//! under every legal order.
//!
//! ```
//! use tessera_reference::{CallInputs, Evaluator, Tensor};
//!
//! let text = "program @double { %x = input : f32[2] %y = toperator.add %x, %x output \"y\", %y }";
//! let program = tessera_ir::parse(text, "double").unwrap();
//! let call = CallInputs::default().with_input("x", Tensor::new(&[2], vec![1.0, 10.0]));
//! let out = Evaluator::new(program.mesh).run(&[&program], &call).unwrap();
//! assert_eq!(out[0]["y"].data(), [2.0, 20.0]);
//! ```

#![forbid(unsafe_code)]

mod collectives;
mod compute;
mod error;
mod evaluator;
mod rank_values;
mod round;
mod tensor;
mod tile_ops;

pub use error::EvalError;
pub use evaluator::{CallInputs, CallScalar, Evaluator, InputTensor};
pub use round::{Rounding, rounding_to};
pub use tensor::Tensor;
