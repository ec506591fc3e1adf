//! LeaderWorkerSet of Kubernetes: a group of pods with one process each, so one process per host.

use tessera_base::Diagnostic;

use super::ProcessPlace;
use super::variables::Variables;
use crate::codes::T0034;

pub(super) fn read_place(variables: &mut Variables<'_>) -> Option<ProcessPlace> {
    let [process, processes] = variables.required(["LWS_WORKER_INDEX", "LWS_GROUP_SIZE"])?;
    let mut place = ProcessPlace::new(process, processes);
    place.host = Some((process, processes));
    place.local_process = Some(0);
    place.local_processes = Some(1);
    place.leader_host = variables.text("LWS_LEADER_ADDRESS");
    if place.leader_host.is_none() {
        variables.reject(
            Diagnostic::error(&T0034, "LWS_WORKER_INDEX is set and LWS_LEADER_ADDRESS is not")
                .with_hint("LeaderWorkerSet sets both in every container of a group"),
        );
    }
    Some(place)
}
