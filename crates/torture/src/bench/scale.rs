//! `cargo xtask bench scale`: what a checkpoint costs over the size of a guest, in each direction.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Serialize;

use super::{Spread, epoch_after, epochs, memory_mb, used_s};
use crate::Lab;
use crate::clock::Instant;
use crate::lab::{LabError, Process, SERVICE_CIDR, SERVICE_V4};
use crate::protected::{Engine, HANG, wait_for_service};

const PORT: u16 = 5000;
/// Filling and first shipping of the largest guest.
const READY_AT_MOST: Duration = Duration::from_secs(300);
/// Fewer checkpoints than these make no median; a guest that gets them late is measured longer.
const EPOCHS_WANTED: usize = 20;
/// Times the length that was asked for.
const LONGER_AT_MOST: u32 = 10;

/// One guest.
#[derive(Clone, Debug)]
pub struct ScaleBench {
    /// The `hotspare` program.
    pub hotspare: PathBuf,
    /// The program of `bench/load.c`.
    pub load: PathBuf,
    /// What it is told, but the port.
    pub words: Vec<String>,
    /// Connections that clients hold to it, idle.
    pub connections: usize,
    /// Between two checkpoints.
    pub epoch: Duration,
    /// How long is measured; longer if there were fewer than twenty checkpoints.
    pub length: Duration,
}

/// What was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ScaleResult {
    /// Every number of the `epoch` events: pause and parts in µs, bytes, pages; `commit_ms`.
    pub epochs: BTreeMap<String, Spread>,
    /// Checkpoints a second.
    pub epochs_per_s: f64,
    /// Bytes on the wire a second.
    pub bytes_per_s: f64,
    /// Processor time of `hotspare run` and of `hotspare spare`, as a part of one processor.
    pub used: [f64; 2],
    /// Resident memory of `hotspare run` and of `hotspare spare`, guest and ghost aside, MB.
    pub rss_mb: [f64; 2],
    /// The most that they had until then, the first copy included, MB.
    pub rss_most_mb: [f64; 2],
    /// Resident memory of the guest and of the ghost, MB.
    pub kept_mb: [f64; 2],
}

/// Measures, in a lab of its own.
pub fn scale(bench: &ScaleBench) -> Result<ScaleResult, LabError> {
    let lab = Lab::new(2)?;
    let engine = Engine {
        binary: bench.hotspare.clone(),
        epoch: bench.epoch,
        service_cidr: Some(SERVICE_CIDR.to_owned()),
        replicated: vec![],
        more: vec![],
    }
    .patient();
    let spare = engine.patient_spare(lab.host(1))?;
    let mut guest = vec![bench.load.display().to_string()];
    guest.extend(bench.words.iter().cloned());
    guest.extend(["--port".to_owned(), PORT.to_string()]);
    let primary = engine.run(lab.host(0), &[lab.host(1)], &guest)?;
    let ready = primary.stdout().find(READY_AT_MOST, |line| (line.text == "ready").then_some(()));
    ready.ok_or_else(|| failed("a guest that is ready", &[&primary, &spare]))?;
    wait_for_service(lab.client(), (SERVICE_V4, PORT).into(), HANG)?;
    let held = connect(&lab, bench.connections)?;
    epoch_after(&primary, Instant::now())
        .map_err(|_| failed("a checkpoint of the guest", &[&primary, &spare]))?;
    let result = measure(bench, &lab, [&primary, &spare]);
    drop(held);
    if primary.try_wait().is_some() || spare.try_wait().is_some() {
        return Err(failed("a guest that lives", &[&primary, &spare]));
    }
    Ok(result)
}

fn measure(bench: &ScaleBench, lab: &Lab, agents @ [primary, spare]: [&Process; 2]) -> ScaleResult {
    let used = || [used_s(primary), used_s(spare)];
    let (start, before) = (Instant::now(), used());
    let (mut end, mut count) = (start, 0);
    for _ in 0..LONGER_AT_MOST {
        (end + bench.length).sleep_until();
        end = Instant::now();
        count = epochs(primary, (start, end)).get("pause_us").map_or(0, Vec::len);
        if count >= EPOCHS_WANTED {
            break;
        }
    }
    let (after, seconds) = (used(), end.since(start).as_secs_f64());
    let part = |one: usize| (after[one] - before[one]) / seconds;
    let values = epochs(primary, (start, end));
    ScaleResult {
        bytes_per_s: values.get("bytes").map_or(0.0, |bytes| bytes.iter().sum::<f64>()) / seconds,
        epochs: values.into_iter().map(|(name, values)| (name, Spread::of(values))).collect(),
        epochs_per_s: count as f64 / seconds,
        used: [part(0), part(1)],
        rss_mb: agents.map(|process| memory_mb(process, "VmRSS:")),
        rss_most_mb: agents.map(|process| memory_mb(process, "VmHWM:")),
        kept_mb: [0, 1].map(|number| lab.host(number).rss_mb_beside(agents[number])),
    }
}

/// Clients that say nothing.
fn connect(lab: &Lab, count: usize) -> Result<Vec<TcpStream>, LabError> {
    let connect = move || -> Result<Vec<TcpStream>, std::io::Error> {
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
        let server = SocketAddr::from((SERVICE_V4, PORT));
        (0..count).map(|_| TcpStream::connect_timeout(&server, HANG)).collect()
    };
    let connected = lab.client().inside(connect);
    connected.map_err(|source| LabError::Io { doing: "connect to the guest".into(), source })
}

fn failed(wanted: &str, agents: &[&Process]) -> LabError {
    let said: Vec<String> = agents.iter().map(|agent| agent.said()).collect();
    let tails = said.iter().map(|said| said.lines().rev().take(10).collect::<Vec<_>>());
    let said: Vec<String> = tails
        .map(|mut tail| {
            tail.reverse();
            tail.join("\n")
        })
        .collect();
    let what = format!("{wanted}; the agents said:\n{}", said.join("\n--\n"));
    LabError::Deadline { what, waited: READY_AT_MOST }
}
