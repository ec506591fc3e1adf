//! The GPU of each rank: what the plan's rank map names, found among the GPUs of this host.

use std::fmt::Write as _;

use tessera_base::Diagnostic;
use tessera_cuda::Gpu;
use tessera_mesh::{Mesh, Rank, RankMap};
use tessera_runtime::T0776;

/// Prefixes of a device name that is the number of a visible GPU, such as `GPU1`.
const NUMBER_PREFIXES: [&str; 4] = ["GPU", "gpu", "cuda:", ""];

/// Returns the position of a rank among the mesh ranks of its host, whose first rank is `first`.
#[must_use]
pub fn position_on_host(mesh: &Mesh, first: u32, rank: Rank) -> u32 {
    (first..rank.0).filter(|r| mesh.contains(Rank(*r))).count() as u32
}

/// Returns the index of a rank's GPU among the visible ones. The rank map names it by UUID, by PCI
/// bus id or by number, after an optional `HOST/`. A map of logical names (`rank0`, `rank1`…) gives
/// the ranks of a host its GPUs in order.
///
/// # Errors
/// T0776 for a GPU that this host does not show, or that another rank of this host has.
pub fn find_gpu(
    gpus: &[Gpu],
    (mesh, map): (&Mesh, &RankMap),
    first_rank_of_host: u32,
    rank: Rank,
) -> Result<u32, Diagnostic> {
    let own = locate(gpus, (mesh, map), first_rank_of_host, rank)?;
    for other in (first_rank_of_host..rank.0).map(Rank).filter(|r| mesh.contains(*r)) {
        if locate(gpus, (mesh, map), first_rank_of_host, other).is_ok_and(|index| index == own) {
            let name = |r| map.device_of(r).unwrap_or_default().to_string();
            return Err(Diagnostic::error(&T0776, format!("ranks {other} and {rank} have the same GPU"))
                .with_label(format!("rank {other}"), name(other))
                .with_label(format!("rank {rank}"), name(rank))
                .with_hint("give each rank of a host a GPU of its own in [devices] order"));
        }
    }
    Ok(own)
}

/// Returns the index of the GPU that holds a rank's shards of arrays, by the same names as [`find_gpu`]. Several
/// ranks may have the same GPU, because arrays alone wait for nobody.
///
/// # Errors
/// T0776 for a GPU that this host does not show.
pub fn find_array_gpu(gpus: &[Gpu], (mesh, map): (&Mesh, &RankMap), rank: Rank) -> Result<u32, Diagnostic> {
    let index = locate(gpus, (mesh, map), 0, rank)?;
    if (index as usize) < gpus.len() {
        return Ok(index);
    }
    let what = format!("rank {rank} needs the GPU {index}, but this host shows {}", gpus.len());
    Err(Diagnostic::error(&T0776, what)
        .with_hint("use a smaller mesh, list more GPUs in CUDA_VISIBLE_DEVICES, or name GPUs in devices="))
}

fn locate(gpus: &[Gpu], (mesh, map): (&Mesh, &RankMap), first: u32, rank: Rank) -> Result<u32, Diagnostic> {
    let name = map.device_of(rank).unwrap_or_default();
    if name == format!("rank{rank}") {
        return Ok(position_on_host(mesh, first, rank));
    }
    let device = name.rsplit('/').next().unwrap_or(name);
    let named = gpus
        .iter()
        .position(|g| g.uuid.eq_ignore_ascii_case(device) || g.pci_bus_id.eq_ignore_ascii_case(device));
    let number = || {
        let digits = NUMBER_PREFIXES.iter().find_map(|p| device.strip_prefix(p)?.parse::<usize>().ok())?;
        (digits < gpus.len()).then_some(digits)
    };
    named.or_else(number).map(|index| index as u32).ok_or_else(|| {
        let d = Diagnostic::error(
            &T0776,
            format!("rank {rank} needs the GPU {name}, which this host does not show"),
        )
        .with_label("[devices] order", name.to_string());
        let shown = |d: Diagnostic, (i, g): (usize, &Gpu)| {
            d.with_label(format!("GPU{i}"), format!("{}, {}", g.uuid, g.pci_bus_id))
        };
        gpus.iter().enumerate().fold(d, shown).with_hint(
            "name a GPU by UUID (nvidia-smi -L), by PCI bus id or by number, and check CUDA_VISIBLE_DEVICES",
        )
    })
}

/// Returns the table that a launcher needs: each rank of the mesh with the device that the plan
/// names, and with the GPU of this host, its UUID, its PCI bus id, its NUMA node and its port, which
/// is its position in the order of bus ids. A GPU that this host does not show has `-`.
#[must_use]
pub fn launch_table(gpus: &[Gpu], mesh: &Mesh, map: &RankMap) -> String {
    let mut buses: Vec<&str> = gpus.iter().map(|g| g.pci_bus_id.as_str()).collect();
    buses.sort_unstable();
    let mut out = "rank\tdevice\tgpu\tuuid\tbus_id\tnuma_node\tport\n".to_string();
    for rank in mesh.inner_ranks() {
        let name = map.device_of(rank).unwrap_or_default();
        let found = find_gpu(gpus, (mesh, map), 0, rank).ok().map(|i| i as usize);
        let row =
            found.and_then(|i| Some((i, gpus.get(i)?))).map_or("-\t-\t-\t-\t-".to_string(), |(i, g)| {
                let port = buses.iter().position(|b| *b == g.pci_bus_id).unwrap_or(0);
                let node = numa_node(&g.pci_bus_id).unwrap_or_else(|| "-".to_string());
                format!("{i}\t{}\t{}\t{node}\t{port}", g.uuid, g.pci_bus_id)
            });
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{rank}\t{name}\t{row}");
    }
    out
}

/// Returns the NUMA node of a PCI device as the kernel states it: -1 on a host with a single node.
#[must_use]
pub fn numa_node(bus: &str) -> Option<String> {
    let path = format!("/sys/bus/pci/devices/{}/numa_node", bus.to_lowercase());
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

#[cfg(test)]
mod tests {
    use tessera_base::Bytes;

    use super::*;

    fn gpu(uuid: &str, bus: &str) -> Gpu {
        Gpu {
            name: "a GPU".into(),
            uuid: uuid.into(),
            pci_bus_id: bus.into(),
            memory: Bytes(1 << 30),
            multiprocessors: 1,
            capability: (9, 0),
            nvlinks: None,
        }
    }

    fn map(mesh: &Mesh, devices: &[&str]) -> RankMap {
        RankMap::new(mesh, devices.iter().map(ToString::to_string).collect()).unwrap()
    }

    // proves: D-22
    #[test]
    fn a_rank_keeps_its_gpu_when_the_system_lists_gpus_in_another_order() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        let (a, b) = (gpu("GPU-aa", "0000:1B:00.0"), gpu("GPU-bb", "0000:9C:00.0"));
        for names in [["GPU-bb", "GPU-aa"], ["0000:9c:00.0", "n1/GPU-aa"]] {
            let map = map(&mesh, &names);
            let uuid = |gpus: &[Gpu], rank| {
                gpus[find_gpu(gpus, (&mesh, &map), 0, Rank(rank)).unwrap() as usize].uuid.clone()
            };
            for listed in [[a.clone(), b.clone()], [b.clone(), a.clone()]] {
                assert_eq!([uuid(&listed, 0), uuid(&listed, 1)], ["GPU-bb", "GPU-aa"], "{names:?}");
            }
        }
        let numbers = map(&mesh, &["GPU1", "cuda:0"]);
        let at = |rank| find_gpu(&[a.clone(), b.clone()], (&mesh, &numbers), 0, Rank(rank)).unwrap();
        assert_eq!([at(0), at(1)], [1, 0]);
        let logical = RankMap::from_device_kind(&mesh, "rank");
        assert_eq!(find_gpu(&[a, b], (&mesh, &logical), 1, Rank(1)).unwrap(), 0);
    }

    // proves: D-22
    #[test]
    fn an_absent_gpu_and_a_shared_one_are_refused_by_name() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        let gpus = [gpu("GPU-aa", "0000:1B:00.0"), gpu("GPU-bb", "0000:9C:00.0")];
        let refused = |names: &[&str]| find_gpu(&gpus, (&mesh, &map(&mesh, names)), 0, Rank(1)).unwrap_err();
        for absent in ["GPU-cc", "GPU2", "cpu1", "0000:FF:00.0"] {
            let d = refused(&["GPU-aa", absent]);
            assert_eq!(d.code.id, "T0776");
            assert!(d.message.contains(absent), "{}", d.message);
        }
        assert!(refused(&["GPU-aa", "GPU0"]).message.contains("ranks 0 and 1 have the same GPU"));
    }

    #[test]
    fn the_launch_table_names_gpu_bus_and_port_of_each_rank() {
        let mesh: Mesh = "tp=2, outside=1".parse().unwrap();
        let gpus = [gpu("GPU-bb", "0000:9C:00.0"), gpu("GPU-aa", "0000:1B:00.0")];
        let table = launch_table(&gpus, &mesh, &map(&mesh, &["leader", "GPU-aa", "GPU-zz"]));
        let rows: Vec<&str> = table.lines().collect();
        assert!(rows[1].starts_with("1\tGPU-aa\t1\tGPU-aa\t0000:1B:00.0\t"), "{table}");
        assert!(rows[1].ends_with("\t0"), "{table}");
        assert_eq!(rows[2], "2\tGPU-zz\t-\t-\t-\t-\t-");
    }
}
