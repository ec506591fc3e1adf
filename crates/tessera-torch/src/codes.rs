//! The diagnostic codes of this crate, in order of id: `T140` Flight Recorder dumps, `T141` and `T142`
//! compile traces, `T143` to `T144` lint rules.

tessera_base::codes! {
    T1400: "Flight Recorder dump cannot be read",
    "A Flight Recorder dump is one file per rank, a pickle or the JSON form of it, as PyTorch writes it when a collective times \
    out. The file ends early, has another form, or is larger in one value than any dump. The message gives the byte. A dump that is \
    cut off comes from a process that was killed while it wrote: leave the file out, and the rank counts as one without a dump.";

    T1401: "dump would run code",
    "Pickle can name any function to be called when it is loaded. A Flight Recorder dump holds numbers, text, lists and dicts alone, \
    so this reader has no opcode that imports, builds or calls, and it stopped at the first one. Nothing was run. The file is not what \
    PyTorch wrote: do not load it with Python's pickle either.";

    T1402: "dump has an unknown format version",
    "The analysis knows the formats 2.0 to 2.10 of the Flight Recorder. Another minor version may have more fields, which is no \
    problem; another major version may have changed the meaning of the known ones, and a wrong accusation costs more than none.";

    T1403: "dump is of gloo",
    "PyTorch writes dumps of the gloo backend with the members of one group alone, and its entries read retired and scheduled \
    even if they completed, so no member can be told from another. Only NCCL dumps can be analysed.";

    T1404: "dumps are not one per rank",
    "The rank of a dump is the number at the end of its file name, as in rank_3 or nccl_trace_rank_3. Two files have the same number, \
    or a file name ends in no number. Put the dumps of one moment of one run in a folder of their own.";
}
