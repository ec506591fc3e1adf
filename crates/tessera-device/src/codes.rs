//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0801: "backend cannot run this program",
    "The program is well formed, but this backend has no kernel for one of its ops in the required dtype and \
layout. The message names the op. Try another backend, strategy or dtype.";

    T0802: "call does not provide the data that the program reads",
    "A program reads its call scalars and input tensors by name. One of them is missing, has the wrong type, or has the wrong \
number of elements. Leader and worker validate envelopes against the plan before a program runs, so this error means that \
the plan and the programs differ.";
}
