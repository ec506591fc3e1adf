//! The diagnostic codes of this crate with their explain pages, ordered by id.

use tessera_base::Code;

/// Diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[&T0801, &T0802];

/// The backend cannot run a program.
pub static T0801: Code = Code {
    id: "T0801",
    title: "backend cannot run this program",
    page: "The program is well formed, but this backend has no kernel for one of its ops in the required dtype and \
layout. The message names the op. Try another backend, strategy or dtype.",
};

/// A call does not provide the data that a program reads.
pub static T0802: Code = Code {
    id: "T0802",
    title: "call does not provide the data that the program reads",
    page: "A program reads its call scalars and input tensors by name. One of them is missing, has the wrong type, or has the wrong \
number of elements. Leader and worker validate envelopes against the plan before a program runs, so this error means that \
the plan and the programs differ.",
};
