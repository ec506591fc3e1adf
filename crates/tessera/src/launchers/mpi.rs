//! The `mpirun` of Open MPI and of MPICH, without MPI itself: only their variables are read.

use super::ProcessPlace;
use super::variables::Variables;

pub(super) fn read_open_mpi(variables: &mut Variables<'_>) -> Option<ProcessPlace> {
    let [process, processes] = variables.required(["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"])?;
    let mut place = ProcessPlace::new(process, processes);
    // OMPI_COMM_WORLD_NODE_RANK counts over all jobs of a host, so it is not the index in this one.
    place.local_process = variables.number("OMPI_COMM_WORLD_LOCAL_RANK", u32::MAX);
    place.local_processes = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", u32::MAX);
    Some(place)
}

pub(super) fn read_mpich(variables: &mut Variables<'_>) -> Option<ProcessPlace> {
    let [process, processes] = variables.required(["PMI_RANK", "PMI_SIZE"])?;
    let mut place = ProcessPlace::new(process, processes);
    place.local_process = variables.number("MPI_LOCALRANKID", u32::MAX);
    place.local_processes = variables.number("MPI_LOCALNRANKS", u32::MAX);
    Some(place)
}
