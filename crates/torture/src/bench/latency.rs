//! `cargo xtask bench latency`: what a guarantee adds to each reply, and takes from throughput.
//!
//! Three loads: one client with one request at a time, seldom; a steady rate on many connections,
//! half of what the unprotected server can do; as much as the connections can.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use super::{Spread, UNLIMITED, epochs, used_s};
use crate::clients::{
    HttpBody, HttpLane, LaneRecord, Load, Outcome, Pace, Protocol, Reply, Session, StorePlan,
};
use crate::clock::{Instant, millis};
use crate::lab::{LabError, Process, SERVICE_CIDR};
use crate::programs::{self, Change, Program, Stage, WORK_DIR, by_name};
use crate::protected::{Engine, HANG, wait_for_service};

/// Requests a second of the client that comes seldom.
const SELDOM_PER_S: f64 = 50.0;
/// Before it is measured a load runs for a quarter of its length, and no longer than this.
const WARM_AT_MOST: Duration = Duration::from_secs(3);
/// What every request asks for or writes.
const VALUE_BYTES: usize = 64;
/// Of a store.
const KEYS: usize = 10_000;
/// A file of [`VALUE_BYTES`] in the directory of the web servers.
const SMALL_PAGE: &str = "/small";

/// The servers, by the names of their programs.
pub const SERVERS: [&str; 6] =
    ["redis-server", "memcached", "tarantool", "lighttpd", "nginx", "go-kv"];

/// One server in one way.
#[derive(Clone, Debug)]
pub struct LatencyBench {
    /// Which of [`SERVERS`].
    pub server: &'static str,
    /// The `hotspare` program and what else it is told; without, the server runs unprotected.
    pub protection: Option<(PathBuf, Vec<String>)>,
    /// Of the steady and of the highest load.
    pub connections: usize,
    /// Replies a second of the unprotected server, if they are known: half is the steady load.
    pub unprotected_per_s: Option<f64>,
    /// Between two checkpoints, where output does not want one sooner.
    pub epoch: Duration,
    /// How long each load is.
    pub length: Duration,
}

/// What a load has met.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Met {
    /// From when a request was due to its reply, ms; from when it was sent under the highest load.
    pub latency_ms: Spread,
    /// Replies a second.
    pub replies_per_s: f64,
    /// Processor time of both agents, as a part of one processor; guest and ghost apart.
    pub agents: f64,
    /// Checkpoints a second.
    pub epochs_per_s: f64,
    /// Of each checkpoint, by name: `pause_us` and its parts, `commit_ms` from the stop until it
    /// was acknowledged.
    pub epochs: BTreeMap<String, Spread>,
}

/// What was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LatencyResult {
    /// One client that comes seldom.
    pub seldom: Met,
    /// Half the load of the unprotected server.
    pub half: Met,
    /// As much as there is.
    pub saturated: Met,
}

/// A server that can be asked.
struct Bed {
    server: &'static str,
    spare: Option<Process>,
    primary: Process,
    stage: Stage,
}

/// Measures, in a lab of its own. Any reply that is wrong, late or missing is an error.
pub fn latency(bench: &LatencyBench) -> Result<LatencyResult, LabError> {
    let bed = bed(bench)?;
    let many = bench.connections;
    let seldom = bed.measure(1, SELDOM_PER_S, bench.length)?;
    let saturated = bed.measure(many, UNLIMITED, bench.length)?;
    let all = bench.unprotected_per_s.unwrap_or(saturated.replies_per_s);
    let half = bed.measure(many, all / 2.0, bench.length)?;
    Ok(LatencyResult { seldom, half, saturated })
}

fn bed(bench: &LatencyBench) -> Result<Bed, LabError> {
    let program = by_name(bench.server).ok_or_else(|| LabError::Io {
        doing: format!("find the program {}", bench.server),
        source: std::io::ErrorKind::NotFound.into(),
    })?;
    let stage = programs::stage(&program, 1, Some(Change::UnnoticedDeath), 2)?;
    let page = format!("work/html{SMALL_PAGE}");
    programs::put(stage.lab.host(0), &page, body().as_bytes())?;
    let (spare, primary) = match &bench.protection {
        Some((binary, more)) => protected(bench, &program, &stage, binary.clone(), more.clone())?,
        None => {
            stage.lab.host(0).add_address(SERVICE_CIDR)?;
            (None, programs::start(stage.lab.host(0), &program.command)?)
        }
    };
    wait_for_service(stage.lab.client(), stage.service, HANG)?;
    if spare.is_some() {
        Engine::protected(&primary)?;
    }
    Ok(Bed { server: bench.server, spare, primary, stage })
}

fn protected(
    bench: &LatencyBench,
    program: &Program,
    stage: &Stage,
    binary: PathBuf,
    more: Vec<String>,
) -> Result<(Option<Process>, Process), LabError> {
    let replicated = program.writes.then(|| WORK_DIR.to_owned()).into_iter().collect();
    let service_cidr = Some(SERVICE_CIDR.to_owned());
    let engine = Engine { binary, epoch: bench.epoch, service_cidr, replicated, more }.patient();
    let spare = engine.patient_spare(stage.lab.host(1))?;
    let primary = engine.run(stage.lab.host(0), &[stage.lab.host(1)], &program.command)?;
    Ok((Some(spare), primary))
}

impl Bed {
    fn measure(&self, lanes: usize, rate_per_s: f64, length: Duration) -> Result<Met, LabError> {
        let pace = Pace { rate_per_s, lanes, reply_at_most: HANG, connect_at_most: HANG };
        let sessions = self.sessions(lanes);
        let client = self.stage.lab.client();
        let load = Load::start_together(client, self.stage.service, pace, sessions, HANG);
        // What connecting and filling has left behind is not measured.
        (Instant::now() + (length / 4).min(WARM_AT_MOST)).sleep_until();
        let used =
            || [Some(&self.primary), self.spare.as_ref()].into_iter().flatten().map(used_s).sum();
        let (start, before): (Instant, f64) = (Instant::now(), used());
        (start + length).sleep_until();
        let (end, after): (Instant, f64) = (Instant::now(), used());
        let agents = (after - before) / end.since(start).as_secs_f64();
        if let Some(status) = self.primary.try_wait() {
            return Err(self.failed(&format!("the server or its agent has ended: {status}")));
        }
        // An unprotected server is no agent.
        let agents = if self.spare.is_some() { agents } else { 0.0 };
        let due = rate_per_s < UNLIMITED;
        Ok(Met { agents, ..self.met(&load.finish(), due, (start, end))? })
    }

    fn sessions(&self, lanes: usize) -> Vec<Box<dyn Session>> {
        let protocol = match self.server {
            "redis-server" => Protocol::Redis,
            "memcached" => Protocol::Memcached,
            "tarantool" => Protocol::Tarantool,
            "go-kv" => Protocol::Line,
            _ => {
                let lane = HttpLane::new(SMALL_PAGE, HttpBody::Exactly(body().into_bytes()));
                return (0..lanes).map(|_| Box::new(lane.clone()) as Box<dyn Session>).collect();
            }
        };
        let plan =
            StorePlan { protocol, keys: KEYS, value_bytes: VALUE_BYTES, writes: 0.5, seed: 1 };
        let lanes = plan.sessions(lanes).into_iter();
        lanes.map(|lane| Box::new(lane) as Box<dyn Session>).collect()
    }

    fn failed(&self, why: &str) -> LabError {
        let said = self.spare.as_ref().map(Process::said).unwrap_or_default();
        let all = format!("{why}\nprimary: {}\nspare: {said}", self.primary.said());
        let doing = format!("measure {}", self.server);
        LabError::Io { doing, source: std::io::Error::other(all) }
    }

    fn met(
        &self,
        lanes: &[LaneRecord<Box<dyn Session>>],
        due: bool,
        (start, end): (Instant, Instant),
    ) -> Result<Met, LabError> {
        let replies = lanes.iter().flat_map(|lane| &lane.replies);
        let bad = replies.clone().filter(|reply| reply.outcome != Outcome::Good).count();
        let broken: u64 = lanes.iter().map(|lane| lane.reconnects).sum();
        if bad > 0 || broken > 0 {
            let wrongs: Vec<_> = lanes.iter().flat_map(|lane| &lane.wrongs).take(3).collect();
            return Err(self.failed(&format!(
                "{bad} requests had no good reply, {broken} connections broke: {wrongs:?}"
            )));
        }
        let inside = replies.filter(|reply| (start..end).contains(&reply.done));
        // Where each waits for the one before, nothing was due sooner.
        let began = |reply: &Reply| if due { reply.due } else { reply.sent };
        let latencies: Vec<f64> =
            inside.map(|reply| millis(reply.done.since(began(reply)))).collect();
        let replies_per_s = latencies.len() as f64 / end.since(start).as_secs_f64();
        let epochs: BTreeMap<String, Spread> = epochs(&self.primary, (start, end))
            .into_iter()
            .map(|(name, values)| (name, Spread::of(values)))
            .collect();
        let count = epochs.get("pause_us").map_or(0, |pauses| pauses.count);
        let epochs_per_s = count as f64 / end.since(start).as_secs_f64();
        let latency_ms = Spread::of(latencies);
        Ok(Met { latency_ms, replies_per_s, agents: 0.0, epochs_per_s, epochs })
    }
}

fn body() -> String {
    (0..VALUE_BYTES).map(|at| char::from(b'a' + (at % 26) as u8)).collect()
}
