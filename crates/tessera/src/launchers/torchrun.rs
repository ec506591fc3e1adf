//! RANK and WORLD_SIZE, which torchrun sets, and scripts that start one process per rank.

use super::ProcessPlace;
use super::variables::Variables;

pub(super) fn read_place(variables: &mut Variables<'_>) -> Option<ProcessPlace> {
    let [process, processes] = variables.required(["RANK", "WORLD_SIZE"])?;
    let mut place = ProcessPlace::new(process, processes);
    place.local_process = variables.number("LOCAL_RANK", u32::MAX);
    place.local_processes = variables.number("LOCAL_WORLD_SIZE", u32::MAX);
    if variables.text("TORCHELASTIC_RUN_ID").is_some() {
        let host = variables.number("GROUP_RANK", u32::MAX);
        place.host = host.zip(variables.number("GROUP_WORLD_SIZE", u32::MAX));
        // The agent of torchrun serves its store at MASTER_PORT as long as its processes run, so
        // rank 0 cannot listen there.
        let store = variables.text("TORCHELASTIC_USE_AGENT_STORE");
        place.port_is_taken = store.is_some_and(|value| value.eq_ignore_ascii_case("true"));
    }
    Some(place)
}
