//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0810: "program cannot be run on a simulated device",
    "The simulated device executes a program of one role unchanged: each op on its stream, each wait after its issue, \
each collective over a group that the rank is a member of. One op of this program violates this. Programs of a sealed \
plan never do, because the verifier has checked them; if this error occurs, the program was changed after verification \
or was never sealed. Run `tessera check` on the program to see the violation.";

    T0811: "ranks of a simulated run wait for each other",
    "No device is busy and no event is pending, but some ranks have unfinished ops: each waits in a collective \
that other members of its group never join, or join with a different collective. On real devices this is a hang.\n\nThe \
message lists the waiting ranks and the ranks that each one waits for. A sealed plan cannot stall; a rank that runs \
another program, or fewer programs than its peers, can cause a stall.";
}
