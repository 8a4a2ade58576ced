//! `cargo xtask bench overhead`: what it costs to keep a Redis from being lost, by Hotspare and by
//! what else people use.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::peers::{Image, Imager, Imaging, replica};
use super::{PORT, Spread, UNLIMITED, epoch_after, epochs, used_s};
use crate::Lab;
use crate::clients::{ClientError, Connection, Load, Outcome, Pace, Reply, Session, resp};
use crate::clock::{Instant, millis};
use crate::dice::Dice;
use crate::lab::{LabError, Process, SERVICE_CIDR, SERVICE_V4};
use crate::programs;
use crate::protected::{Engine, HANG, wait_for_service};

/// How a Redis is kept from being lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Not at all.
    Unprotected,
    /// Hotspare, `--guarantee timeline`.
    Timeline,
    /// Hotspare, `--guarantee output-commit`.
    OutputCommit,
    /// Hotspare, `--stop-and-copy`: the floor of what can be done, as gcore(1) would.
    StopAndCopy,
    /// A replica that follows.
    Replica,
    /// A replica; every write is followed by `WAIT 1`.
    ReplicaWait,
    /// An append-only file, synchronised once a second.
    AofEverysec,
    /// An append-only file, synchronised before each reply.
    AofAlways,
    /// `BGSAVE`, again and again.
    BgSave,
    /// `SAVE`, again and again.
    Save,
    /// `criu dump --leave-running`, again and again.
    Criu,
}

impl Way {
    /// All of them, as tables have them.
    pub const ALL: [Way; 11] = [
        Way::Unprotected,
        Way::Timeline,
        Way::OutputCommit,
        Way::StopAndCopy,
        Way::Replica,
        Way::ReplicaWait,
        Way::AofEverysec,
        Way::AofAlways,
        Way::BgSave,
        Way::Save,
        Way::Criu,
    ];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Way::Unprotected => "unprotected",
            Way::Timeline => "Hotspare timeline",
            Way::OutputCommit => "Hotspare output-commit",
            Way::StopAndCopy => "Hotspare stop-and-copy",
            Way::Replica => "Redis replica",
            Way::ReplicaWait => "Redis replica, WAIT 1",
            Way::AofEverysec => "Redis AOF everysec",
            Way::AofAlways => "Redis AOF always",
            Way::BgSave => "Redis BGSAVE",
            Way::Save => "Redis SAVE",
            Way::Criu => "CRIU dump",
        }
    }

    /// What acknowledged writes are lost with the host, disk and all.
    pub fn loses(self) -> &'static str {
        match self {
            Way::Unprotected => "all",
            Way::Timeline | Way::StopAndCopy => "up to an interval",
            Way::OutputCommit | Way::ReplicaWait => "none",
            Way::Replica => "what is on its way",
            Way::AofEverysec | Way::AofAlways | Way::BgSave | Way::Save | Way::Criu => {
                "all: files of the same host"
            }
        }
    }

    /// Whether it is a program `hotspare run`, and with which arguments.
    fn hotspare(self) -> Option<&'static [&'static str]> {
        match self {
            Way::Timeline => Some(&[]),
            Way::OutputCommit => Some(&["--guarantee", "output-commit"]),
            Way::StopAndCopy => Some(&["--stop-and-copy"]),
            _ => None,
        }
    }
}

/// A Redis kept in one way.
#[derive(Clone, Debug)]
pub struct OverheadBench {
    /// How.
    pub way: Way,
    /// The `hotspare` program.
    pub hotspare: PathBuf,
    /// The `criu` program.
    pub criu: PathBuf,
    /// Records.
    pub keys: u64,
    /// Of each.
    pub value_bytes: usize,
    /// Parts of requests that are writes, one after the other.
    pub writes: Vec<f64>,
    /// Connections.
    pub connections: usize,
    /// Requests a second of the steady load; none is made if it is 0.
    pub rate_per_s: f64,
    /// Between two checkpoints or images.
    pub interval: Duration,
    /// How long each load is.
    pub length: Duration,
}

/// What one share of writes has met.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct OverheadResult {
    /// Part of requests that were writes.
    pub writes: f64,
    /// Under the steady load, from when a request was due, ms.
    pub steady_ms: Spread,
    /// Each connection as fast as replies come.
    pub replies_per_s: f64,
    /// Of these, from when a request was sent, ms.
    pub saturated_ms: Spread,
    /// Processor time of all programs of the primary's host under the highest load, as a part of
    /// one processor.
    pub primary: f64,
    /// Of which the agent.
    pub agent: f64,
    /// As `primary`, of the spare's host.
    pub spare: f64,
    /// Checkpoints or images a second under the highest load.
    pub images_per_s: f64,
    /// How long Redis stood still for each, ms.
    pub pause_ms: Spread,
    /// What a checkpoint has sent, bytes; nothing is known of peers.
    pub bytes: Spread,
}

/// Starts a program in a session of its own, with nothing open to somebody outside: CRIU dumps
/// neither otherwise.
const ALONE: &str = r#"
    exec < /dev/null > /dev/null 2>&1
    for open in /proc/$$/fd/*; do
        number=${open##*/}
        [ "$number" -le 2 ] || eval "exec $number>&-"
    done
    exec setsid "$@"
"#;

/// A filled Redis, kept.
pub(super) struct Bed {
    imager: Option<Imager>,
    spare: Option<Process>,
    /// The Redis, or its agent.
    pub(super) primary: Process,
    pub(super) lab: Lab,
}

/// Measures, in a lab of its own. Any reply that is wrong, late or missing is an error.
pub fn overhead(bench: &OverheadBench) -> Result<Vec<OverheadResult>, LabError> {
    let mut bed = make_bed(bench)?;
    let mut results = Vec::new();
    let mut spans = Vec::new();
    for &writes in &bench.writes {
        let steady_ms = match bench.rate_per_s {
            rate if rate > 0.0 => measure(bench, &bed, writes, rate)?.latency_ms,
            _ => Spread::default(),
        };
        let met = measure(bench, &bed, writes, UNLIMITED)?;
        let [primary, agent, spare] = met.used;
        let is_ours = bench.way.hotspare().is_some();
        results.push(OverheadResult {
            writes,
            steady_ms,
            replies_per_s: met.replies_per_s,
            saturated_ms: met.latency_ms,
            primary,
            agent: if is_ours { agent } else { 0.0 },
            spare,
            ..OverheadResult::default()
        });
        spans.push(met.span);
    }
    let images = bed.imager.take().map(Imager::finish).transpose()?.unwrap_or_default();
    for (result, span) in results.iter_mut().zip(spans) {
        points(result, &bed.primary, &images, span);
    }
    Ok(results)
}

/// Checkpoints and images of a span.
fn points(
    result: &mut OverheadResult,
    primary: &Process,
    images: &[Image],
    (start, end): (Instant, Instant),
) {
    let mut epochs = epochs(primary, (start, end));
    let inside = images.iter().filter(|image| (start..end).contains(&image.done));
    let mut pauses: Vec<f64> = inside.map(|image| image.pause_ms).collect();
    let ours = epochs.remove("pause_us").unwrap_or_default();
    pauses.extend(ours.iter().map(|us| us / 1e3));
    result.images_per_s = pauses.len() as f64 / end.since(start).as_secs_f64();
    result.pause_ms = Spread::of(pauses);
    result.bytes = Spread::of(epochs.remove("bytes").unwrap_or_default());
}

pub(super) fn make_bed(bench: &OverheadBench) -> Result<Bed, LabError> {
    let lab = Lab::new(2)?;
    let redis = redis(bench.way);
    let (spare, primary) = match bench.way.hotspare() {
        Some(more) => {
            let engine = Engine {
                binary: bench.hotspare.clone(),
                epoch: bench.interval,
                service_cidr: Some(SERVICE_CIDR.to_owned()),
                replicated: vec![],
                more: more.iter().map(|word| (*word).to_owned()).collect(),
            }
            .patient();
            let spare = engine.patient_spare(lab.host(1))?;
            (Some(spare), engine.run(lab.host(0), &[lab.host(1)], &redis)?)
        }
        None => {
            lab.host(0).add_address(SERVICE_CIDR)?;
            let shell = ["bash", "-c", ALONE, "bash"].iter().map(|word| (*word).to_owned());
            let command: Vec<String> = shell.chain(redis.iter().cloned()).collect();
            (None, programs::start(lab.host(0), &command)?)
        }
    };
    wait_for_service(lab.client(), (SERVICE_V4, PORT).into(), HANG)?;
    super::fill_with(&lab, bench.keys, bench.value_bytes)?;
    let mut bed = Bed { imager: None, spare, primary, lab };
    settle(bench, &mut bed, &redis)?;
    Ok(bed)
}

/// Makes whole what is to follow the Redis, and starts who makes images of it.
fn settle(bench: &OverheadBench, bed: &mut Bed, redis: &[String]) -> Result<(), LabError> {
    let host = bed.lab.host(0);
    let imaging = match bench.way {
        Way::Timeline | Way::OutputCommit | Way::StopAndCopy => {
            return epoch_after(&bed.primary, Instant::now());
        }
        Way::Replica | Way::ReplicaWait => {
            bed.spare = Some(replica(redis, bed.lab.host(1), host)?);
            return Ok(());
        }
        Way::Unprotected | Way::AofEverysec | Way::AofAlways => return Ok(()),
        Way::Save => Imaging::Save,
        Way::BgSave => Imaging::BgSave,
        Way::Criu => Imaging::Criu(bench.criu.clone()),
    };
    bed.imager = Some(Imager::start(imaging, host, bed.primary.pid(), bench.interval));
    Ok(())
}

fn redis(way: Way) -> Vec<String> {
    let more: &[&str] = match way {
        Way::AofEverysec => &["--appendonly", "yes", "--appendfsync", "everysec"],
        Way::AofAlways => &["--appendonly", "yes", "--appendfsync", "always"],
        // The first copy begins at once, not 5 s later, when more replicas might have come.
        Way::Replica | Way::ReplicaWait => &["--repl-diskless-sync-delay", "0"],
        _ => &[],
    };
    super::redis().into_iter().chain(more.iter().map(|word| (*word).to_owned())).collect()
}

/// What one load has met.
struct Met {
    latency_ms: Spread,
    replies_per_s: f64,
    /// Processor time of the primary's host, its agent, the spare's host.
    used: [f64; 3],
    span: (Instant, Instant),
}

fn measure(
    bench: &OverheadBench,
    bed: &Bed,
    writes: f64,
    rate_per_s: f64,
) -> Result<Met, LabError> {
    let lanes = bench.connections;
    let pace = Pace { rate_per_s, lanes, reply_at_most: HANG, connect_at_most: HANG };
    let wait = bench.way == Way::ReplicaWait;
    let record = |lane| Records {
        dice: Dice::new(11).part(lane),
        keys: bench.keys,
        value_bytes: bench.value_bytes,
        writes,
        wait,
        asked: (0, false),
    };
    let sessions = (0..lanes as u64).map(record).collect();
    let server = (SERVICE_V4, PORT).into();
    let load = Load::start_together(bed.lab.client(), server, pace, sessions, HANG);
    let used = || {
        let host = |number: usize| bed.lab.host(number).used_s();
        Ok::<_, LabError>([host(0)?, used_s(&bed.primary), host(1)?])
    };
    let (start, before) = (Instant::now(), used()?);
    (start + bench.length).sleep_until();
    let (end, after) = (Instant::now(), used()?);
    let lanes = load.finish();
    let replies = || lanes.iter().flat_map(|lane| &lane.replies);
    let bad = replies().filter(|reply| reply.outcome != Outcome::Good).count();
    let broken: u64 = lanes.iter().map(|lane| lane.reconnects).sum();
    if bad > 0 || broken > 0 {
        let wrongs: Vec<_> = lanes.iter().flat_map(|lane| &lane.wrongs).take(3).collect();
        let said = bed.spare.as_ref().map(Process::said).unwrap_or_default();
        return Err(LabError::Io {
            doing: format!("measure {}", bench.way.name()),
            source: std::io::Error::other(format!(
                "{bad} requests had no good reply, {broken} connections broke: {wrongs:?}\n\
                 primary: {}\nspare: {said}",
                bed.primary.said()
            )),
        });
    }
    // Where each request waits for the one before, none was due sooner than it was sent.
    let is_due = rate_per_s < UNLIMITED;
    let began = |reply: &Reply| if is_due { reply.due } else { reply.sent };
    let inside = replies().filter(|reply| (start..end).contains(&reply.done));
    let latencies: Vec<f64> = inside.map(|reply| millis(reply.done.since(began(reply)))).collect();
    let seconds = end.since(start).as_secs_f64();
    let used = std::array::from_fn(|one| (after[one] - before[one]) / seconds);
    let replies_per_s = latencies.len() as f64 / seconds;
    Ok(Met { latency_ms: Spread::of(latencies), replies_per_s, used, span: (start, end) })
}

/// Reads and writes of random records. A record says whose it is, so a reply that belongs to
/// another request is noticed.
struct Records {
    dice: Dice,
    keys: u64,
    value_bytes: usize,
    writes: f64,
    wait: bool,
    /// What was asked for last: which record, and whether it was written.
    asked: (u64, bool),
}

impl Session for Records {
    fn ask(&mut self, request: &mut Vec<u8>) {
        let number = self.dice.below(self.keys);
        self.asked = (number, self.dice.chance(self.writes));
        let key = format!("key:{number}");
        if !self.asked.1 {
            request.extend_from_slice(resp(&["GET", &key]).as_bytes());
            return;
        }
        // As `DEBUG POPULATE` has filled it, but for the padding.
        let value = format!("{:.<1$}", format!("value:{number};"), self.value_bytes);
        request.extend_from_slice(resp(&["SET", &key, &value]).as_bytes());
        if self.wait {
            request.extend_from_slice(resp(&["WAIT", "1", "0"]).as_bytes());
        }
    }

    fn take(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        let (number, wrote) = self.asked;
        if !wrote {
            return self.take_record(connection, number);
        }
        is("+OK", connection.line()?)?;
        if self.wait { is(":1", connection.line()?) } else { Ok(()) }
    }

    fn close(&mut self, _connection: &mut Connection) -> Result<(), ClientError> {
        Ok(())
    }
}

impl Records {
    fn take_record(&self, connection: &mut Connection, number: u64) -> Result<(), ClientError> {
        is(&format!("${}", self.value_bytes), connection.line()?)?;
        let record = connection.bytes(self.value_bytes + 2)?;
        let named = record.strip_prefix(format!("value:{number}").as_bytes());
        let is_whole = named.and_then(<[u8]>::first).is_some_and(|next| !next.is_ascii_digit());
        if is_whole {
            return Ok(());
        }
        let said = String::from_utf8_lossy(record).into_owned();
        Err(ClientError::Wrong(format!("record {number} is {said:?}")))
    }
}

fn is(good: &str, line: &[u8]) -> Result<(), ClientError> {
    if line == good.as_bytes() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(line).into_owned();
    Err(ClientError::Wrong(format!("{said:?} instead of {good:?}")))
}
