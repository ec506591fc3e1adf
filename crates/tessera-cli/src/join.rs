//! `tessera stream` as one rank among ranks that somebody else started: which place the environment gives it, and what the
//! command line says of how ranks prove themselves.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use tessera::join::{JoinEvent, JoinOptions, JoinReport, T0034, TlsFiles};
use tessera::stream::{Device, StreamEvent, StreamOptions};
use tessera::{Interrupt, Model, Plan};
use tessera_base::{Diagnostic, Format, render_all};

use crate::progress::Progress;
use crate::say::{Outcome, Refusal, Shape};
use crate::stream::{INTERRUPTED, STOPPING, listen, tell};

const JOINING: &str = "Ranks on several hosts (with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set)";
/// How long other ranks are waited for by default.
const JOIN_LIMIT_S: u64 = 300;
const ALL: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// Options of a rank that joins.
#[derive(Debug, clap::Args)]
pub struct Joining {
    /// File with the run's secret, the same on every rank: 32 bytes or more
    #[arg(long, value_name = "FILE", help_heading = JOINING)]
    pub secret: Option<PathBuf>,

    /// This rank's certificate, in PEM; ranks then speak TLS
    #[arg(long, value_name = "FILE", help_heading = JOINING)]
    pub tls_cert: Option<PathBuf>,

    /// Key of this rank's certificate, in PEM
    #[arg(long, value_name = "FILE", help_heading = JOINING)]
    pub tls_key: Option<PathBuf>,

    /// Certificates of the authority that every rank believes, in PEM
    #[arg(long, value_name = "FILE", help_heading = JOINING)]
    pub tls_ca: Option<PathBuf>,

    /// Address of this host at which to listen for other ranks [default: MASTER_ADDR on rank 0, the address that reaches
    /// rank 0 on others]
    #[arg(long, value_name = "ADDRESS", help_heading = JOINING)]
    pub bind: Option<IpAddr>,

    /// How long to wait for the other ranks, in seconds [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400), help_heading = JOINING)]
    pub join_timeout: Option<u64>,
}

impl Joining {
    /// The place that the environment gives this process, if any.
    pub fn place(&self) -> Result<Option<JoinOptions>, Refusal> {
        self.place_in(&|name| std::env::var(name).ok()).map_err(|d| Refusal::usage(vec![*d]))
    }

    fn place_in(&self, env: &dyn Fn(&str) -> Option<String>) -> Result<Option<JoinOptions>, Box<Diagnostic>> {
        let refuse = |message: String| Diagnostic::error(&T0034, message);
        let set = |name: &str| env(name).filter(|v| !v.trim().is_empty());
        // An address alone is left over from something else; a rank or a world means this process.
        if set("RANK").is_none() && set("WORLD_SIZE").is_none() {
            let given = [
                ("--secret", self.secret.is_some()),
                ("--tls-cert", self.tls_cert.is_some()),
                ("--tls-key", self.tls_key.is_some()),
                ("--tls-ca", self.tls_ca.is_some()),
                ("--bind", self.bind.is_some()),
                ("--join-timeout", self.join_timeout.is_some()),
            ];
            return match given.into_iter().find(|(_, given)| *given) {
                Some((option, _)) => Err(Box::new(
                    refuse(format!("{option} is for ranks that join, and RANK and WORLD_SIZE are not set"))
                        .hint(format!("set {} on every rank, or leave {option} out", ALL.join(", "))),
                )),
                None => Ok(None),
            };
        }
        let missing: Vec<&str> = ALL.into_iter().filter(|n| set(n).is_none()).collect();
        if !missing.is_empty() {
            let there: Vec<&str> = ALL.into_iter().filter(|n| set(n).is_some()).collect();
            return Err(Box::new(
                refuse(format!("{} is set and {} is not", there.join(" and "), missing.join(" and ")))
                    .hint("set all four to join other ranks, or none to start all ranks on this host"),
            ));
        }
        let number = |name: &str, most: u32| -> Result<u32, Box<Diagnostic>> {
            let text = set(name).unwrap_or_default();
            let read = text.trim().parse::<u32>().ok().filter(|n| *n <= most);
            read.ok_or_else(|| {
                Box::new(
                    refuse(format!("{name} is no whole number from 0 to {most}"))
                        .at(name, format!("`{text}`")),
                )
            })
        };
        let tls = match (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            (Some(certificate), Some(key), Some(authority)) => Some(TlsFiles {
                certificate: certificate.clone(),
                key: key.clone(),
                authority: authority.clone(),
            }),
            (None, None, None) => None,
            _ => {
                return Err(Box::new(
                    refuse("some files of certificates are named and some are not".into())
                        .hint("--tls-cert, --tls-key and --tls-ca go together"),
                ));
            }
        };
        let local_world = match set("LOCAL_WORLD_SIZE") {
            Some(_) => number("LOCAL_WORLD_SIZE", u32::MAX)?,
            None => 1,
        };
        let local_rank = set("LOCAL_RANK").map(|_| number("LOCAL_RANK", u32::MAX)).transpose()?;
        let port = number("MASTER_PORT", u32::from(u16::MAX))?;
        Ok(Some(JoinOptions {
            rank: number("RANK", u32::MAX)?,
            world: number("WORLD_SIZE", u32::MAX)?,
            master: (set("MASTER_ADDR").unwrap_or_default().trim().to_string(), port as u16),
            local_world,
            local_rank,
            bind: self.bind,
            secret: self.secret.clone(),
            tls,
            timeout: Duration::from_secs(self.join_timeout.unwrap_or(JOIN_LIMIT_S)),
        }))
    }
}

/// Runs one rank.
pub fn run(
    plan: Plan,
    model: &Model,
    options: &StreamOptions,
    place: &JoinOptions,
    quiet: bool,
    format: Shape,
) -> Outcome {
    let leads = place.rank == 0;
    let progress = Progress::new(quiet || !leads, options.chunks);
    let interrupt = Interrupt::default();
    let met = Arc::new(AtomicBool::new(false));
    let first = {
        let met = Arc::clone(&met);
        move || if met.load(Ordering::Relaxed) { STOPPING } else { "stopping before all ranks have met" }
    };
    // Until they have met, a request to end another rank ends it at once: rank 0 sees it leave.
    let mut listener = if leads { listen(&interrupt, &progress, first) } else { None };
    let report = tessera::join::run(plan, model, options, place, &interrupt, &mut |e| match e {
        JoinEvent::Note(d) => eprint!("{}", render_all(&[d], Format::Text, &|_| None)),
        JoinEvent::Met(addresses) => {
            met.store(true, Ordering::Relaxed);
            if !leads {
                listener = leave_to_leader(place.rank);
            } else if !quiet {
                progress.say(&format!("all {} ranks have met at {}", place.world, addresses.join(", ")));
            }
        }
        JoinEvent::Chunk(chunk) => progress.on(&StreamEvent::Chunk(chunk)),
        JoinEvent::Failed(failure) => crate::stream::tell_failure(&failure),
    });
    if let Some(listener) = listener {
        listener.close();
    }
    progress.end();
    let report = report.map_err(|ds| match tessera::join::class(&ds) {
        Some(class) => Refusal::with_status(ds, u8::try_from(class.exit_code()).unwrap_or(1)),
        None if interrupt.asked() => Refusal::with_status(ds, INTERRUPTED),
        None => ds.into(),
    })?;
    match report {
        JoinReport::Leader(report) => tell(&report, format, report.failure.is_some()),
        JoinReport::Rank(None) => Ok(0),
        JoinReport::Cut => {
            eprintln!("rank {}: rank 0 was asked twice to stop", place.rank);
            tessera::exit(INTERRUPTED.into())
        }
        JoinReport::Rank(Some(failure)) => {
            eprintln!("rank {}:", place.rank);
            crate::stream::tell_failure(&failure);
            // Handlers of a GPU's libraries would wait for work that does not end.
            let leave = if options.device == Device::Cuda { tessera::exit_at_once } else { tessera::exit };
            leave(failure.class.exit_code())
        }
    }
}

/// A request to stop that reaches every rank is rank 0's to answer: it drains, and the others leave with it. A second one
/// ends this rank at once.
fn leave_to_leader(rank: u32) -> Option<Handle> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).ok()?;
    let handle = signals.handle();
    let listen = move || {
        let mut signals = signals.forever();
        if signals.next().is_some() {
            eprintln!("rank {rank}: rank 0 stops all ranks when it is asked to; again to leave at once");
        }
        if signals.next().is_some() {
            tessera::exit(INTERRUPTED.into());
        }
    };
    std::thread::Builder::new().name("signals".to_string()).spawn(listen).ok()?;
    Some(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(env: &[(&str, &str)]) -> Result<Option<JoinOptions>, String> {
        let joining = Joining {
            secret: Some("secret".into()),
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
            bind: None,
            join_timeout: Some(5),
        };
        let get = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_string());
        joining.place_in(&get).map_err(|d| {
            assert_eq!(d.code, &T0034);
            d.message
        })
    }

    #[test]
    fn a_place_is_whole_or_refused() {
        let whole =
            [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "head.example"), ("MASTER_PORT", "29500")];
        let p = place(&whole).unwrap().unwrap();
        assert_eq!((p.rank, p.world, p.master, p.local_world), (1, 2, ("head.example".into(), 29500), 1));
        assert!(
            place(&whole[..2])
                .unwrap_err()
                .contains("RANK and WORLD_SIZE is set and MASTER_ADDR and MASTER_PORT")
        );
        assert_eq!(p.local_rank, None);
        let local = [&whole[..], &[("LOCAL_RANK", "3")]].concat();
        assert_eq!(place(&local).unwrap().unwrap().local_rank, Some(3));
        assert!(place(&[]).unwrap_err().contains("--secret is for ranks that join"));
        let timeout = Joining {
            secret: None,
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
            bind: None,
            join_timeout: Some(5),
        };
        let refused = timeout.place_in(&|_| None).unwrap_err();
        assert!(refused.message.contains("--join-timeout is for ranks that join"), "{refused:?}");
        let port = [&whole[..3], &[("MASTER_PORT", "65536")]].concat();
        assert!(place(&port).unwrap_err().contains("MASTER_PORT is no whole number from 0 to 65535"));
        let rank = [&[("RANK", "-1")], &whole[1..]].concat();
        assert!(place(&rank).unwrap_err().contains("RANK is no whole number"));
    }
}
