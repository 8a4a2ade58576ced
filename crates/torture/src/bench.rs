//! Measurements. Here `cargo xtask bench pause`: how long checkpoints stop a Redis, part by part,
//! and what they cost its clients, over its size and its load.

mod batch;
mod failover;
mod latency;
mod overhead;
mod peers;
mod rivals;
mod scale;
mod ycsb;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Lab;
use crate::clients::{ClientError, Connection, LaneRecord, Load, Outcome, Pace, Protocol, Session};
use crate::clock::{Instant, millis};
use crate::dice::Dice;
use crate::lab::{Host, LabError, Process, SERVICE_CIDR, SERVICE_V4};
use crate::protected::{Engine, HANG, wait_for_service};

pub use self::batch::{BatchBench, BatchProgram, BatchResult, batch};
pub use self::failover::{FailoverBench, FailoverResult, Victim, failover};
pub use self::latency::{LatencyBench, LatencyResult, Met, SERVERS, latency};
pub use self::overhead::{OverheadBench, OverheadResult, Way, overhead};
pub use self::rivals::{Keeper, RivalBench, RivalResult, rival};
pub use self::scale::{ScaleBench, ScaleResult, scale};
pub use self::ycsb::{
    Weight, YcsbBench, YcsbCore, YcsbResult, build_ycsb, build_ycsb_java, weigh, ycsb,
};

const PORT: u16 = 6379;
const VALUE_BYTES: usize = 72;
/// Filling ten million keys and shipping them to a spare.
const FILL_AT_MOST: Duration = Duration::from_secs(600);

/// One measurement.
#[derive(Clone, Debug)]
pub struct PauseBench {
    /// The `hotspare` program; without, Redis runs unprotected, as the measure of throughput.
    pub hotspare: Option<PathBuf>,
    /// Whether there is a spare. Without one `hotspare run` takes no checkpoints, but Redis is in
    /// namespaces of its own, behind one bridge more.
    pub spare: bool,
    /// More arguments of `hotspare run`, such as `--stop-and-copy`.
    pub more: Vec<String>,
    /// Keys of 72 bytes.
    pub keys: u64,
    /// Part of requests that are writes.
    pub writes: f64,
    /// Requests a second of the steady load.
    pub rate_per_s: f64,
    /// Between two checkpoints.
    pub epoch: Duration,
    /// How long is measured.
    pub length: Duration,
}

/// Mean, median, 99th percentile and maximum.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// Half are no more.
    pub p50: f64,
    /// 99 % are no more.
    pub p99: f64,
    /// All are no more.
    pub max: f64,
    /// How many there were.
    pub count: usize,
}

impl Spread {
    /// Of these values; all zero if there are none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let last = values.len().saturating_sub(1);
            values.get((last as f64 * part).round() as usize).copied().unwrap_or_default()
        };
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        Spread { mean, p50: at(0.5), p99: at(0.99), max: at(1.0), count: values.len() }
    }
}

/// The middle one, or the mean of the two in the middle; 0 if there are none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = |place: usize| values.get(place).copied().unwrap_or_default();
    (at(values.len().saturating_sub(1) / 2) + at(values.len() / 2)) / 2.0
}

/// One load and what it met.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Measured {
    /// Every number of the `epoch` events: pause and parts in µs, bytes, pages, by name.
    pub epochs: BTreeMap<String, Spread>,
    /// Replies a second.
    pub replies_per_s: f64,
    /// Latency of replies in ms, from when they were due.
    pub latency_ms: Spread,
    /// Processor time of `hotspare run` and of `hotspare spare`, as a part of one processor.
    pub used: [f64; 2],
}

/// What was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PauseResult {
    /// Requests at a fixed rate.
    pub steady: Measured,
    /// Eight connections, each as fast as replies come.
    pub saturated: Measured,
    /// Resident memory of Redis, MB.
    pub guest_mb: f64,
    /// Most resident memory of `hotspare run` so far, the guest aside.
    pub primary_rss_mb: f64,
    /// Most resident memory of `hotspare spare` so far, the ghost aside.
    pub spare_rss_mb: f64,
}

/// A filled Redis, protected if it is to be.
struct Bed {
    spare: Option<Process>,
    primary: Process,
    lab: Lab,
}

fn make_bed(bench: &PauseBench) -> Result<Bed, LabError> {
    let lab = Lab::new(2)?;
    let service_cidr = Some(SERVICE_CIDR.to_owned());
    let (spare, primary) = match &bench.hotspare {
        Some(binary) => {
            let (binary, epoch) = (binary.clone(), bench.epoch);
            let engine = Engine {
                binary,
                epoch,
                service_cidr,
                replicated: vec![],
                more: bench.more.clone(),
            };
            let spare = bench.spare.then(|| engine.spare(lab.host(1))).transpose()?;
            let spares: Vec<&Host> = bench.spare.then(|| &**lab.host(1)).into_iter().collect();
            (spare, engine.run(lab.host(0), &spares, &redis())?)
        }
        None => {
            lab.host(0).add_address(SERVICE_CIDR)?;
            let redis = redis();
            (None, lab.host(0).spawn(Command::new(&redis[0]).args(&redis[1..]))?)
        }
    };
    wait_for_service(lab.client(), (SERVICE_V4, PORT).into(), HANG)?;
    fill(&lab, bench.keys)?;
    let whole = Instant::now();
    if bench.spare {
        epoch_after(&primary, whole)?;
    }
    Ok(Bed { spare, primary, lab })
}

fn start_load(bench: &PauseBench, lab: &Lab, rate_per_s: f64) -> Load<Mix> {
    let (pace, sessions) = mixes(bench, rate_per_s);
    Load::start(lab.client(), (SERVICE_V4, PORT).into(), pace, sessions, HANG)
}

fn mixes(bench: &PauseBench, rate_per_s: f64) -> (Pace, Vec<Mix>) {
    let pace = Pace { rate_per_s, lanes: 8, reply_at_most: HANG, ..Pace::default() };
    (pace, (0..pace.lanes as u64).map(|lane| Mix::new(bench, lane)).collect())
}

/// More than anybody can send.
const UNLIMITED: f64 = 1e9;

fn measure(bench: &PauseBench, bed: &Bed, rate_per_s: f64) -> Measured {
    let (pace, sessions) = mixes(bench, rate_per_s);
    let server = (SERVICE_V4, PORT).into();
    let load = Load::start_together(bed.lab.client(), server, pace, sessions, HANG);
    let used = || [Some(&bed.primary), bed.spare.as_ref()].map(|one| one.map_or(0.0, used_s));
    let (start, before) = (Instant::now(), used());
    (start + bench.length).sleep_until();
    let (end, after) = (Instant::now(), used());
    let seconds = end.since(start).as_secs_f64();
    let used = std::array::from_fn(|one| (after[one] - before[one]) / seconds);
    Measured { used, ..measured(&load.finish(), &bed.primary, (start, end)) }
}

/// Processor time a process has used so far, its threads' included (proc_pid_stat(5)).
fn used_s(process: &Process) -> f64 {
    let stat = process.proc("stat");
    let words = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
    // Fields 14 and 15; the third follows the name. A tick is 10 ms.
    words.skip(11).take(2).filter_map(|word| word.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Measures pauses and throughput, in a lab of its own. Nothing steady is measured without
/// protection.
pub fn pause(bench: &PauseBench) -> Result<PauseResult, LabError> {
    let bed = make_bed(bench)?;
    let steady = bench.spare.then(|| measure(bench, &bed, bench.rate_per_s));
    let saturated = measure(bench, &bed, UNLIMITED);
    let rss = |process: &Process| memory_mb(process, "VmHWM:");
    Ok(PauseResult {
        steady: steady.unwrap_or_default(),
        saturated,
        guest_mb: guest_mb(&bed)?,
        primary_rss_mb: rss(&bed.primary),
        spare_rss_mb: bed.spare.as_ref().map_or(0.0, rss),
    })
}

/// What Redis says of its memory.
fn guest_mb(bed: &Bed) -> Result<f64, LabError> {
    let ask = || {
        let mut connection = Connection::open((SERVICE_V4, PORT).into(), HANG, HANG)?;
        connection.send(b"INFO memory\r\n")?;
        let head = connection.line()?;
        let count = head.strip_prefix(b"$").and_then(|count| std::str::from_utf8(count).ok());
        let count = count.and_then(|count| count.parse().ok()).unwrap_or(0);
        let text = String::from_utf8_lossy(connection.bytes(count)?).into_owned();
        let line = text.lines().find_map(|line| line.strip_prefix("used_memory_rss:"));
        Ok(line.and_then(|bytes| bytes.trim().parse::<f64>().ok()).unwrap_or_default())
    };
    let bytes: Result<f64, ClientError> = bed.lab.client().inside(ask);
    bytes.map(|bytes| bytes / 1e6).map_err(|error| LabError::Io {
        doing: "ask Redis for its memory".into(),
        source: std::io::Error::other(error),
    })
}

/// A line of the status of a process (proc_pid_status(5)), in MB; 0 if it is gone.
fn memory_mb(process: &Process, name: &str) -> f64 {
    let status = process.proc("status");
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.unwrap_or_default() * 1024.0 / 1e6
}

fn redis() -> Vec<String> {
    let port = PORT.to_string();
    let words = ["redis-server", "--port", &port, "--bind", "*", "-::*", "--save", ""];
    let more = ["--appendonly", "no", "--protected-mode", "no", "--enable-debug-command", "yes"];
    words.iter().chain(&more).map(|word| (*word).to_owned()).collect()
}

fn fill(lab: &Lab, keys: u64) -> Result<(), LabError> {
    fill_with(lab, keys, VALUE_BYTES)
}

/// Redis fills itself, as fast as it can.
fn fill_with(lab: &Lab, keys: u64, value_bytes: usize) -> Result<(), LabError> {
    let populate = move || {
        let mut connection = Connection::open((SERVICE_V4, PORT).into(), HANG, FILL_AT_MOST)?;
        let command = format!("DEBUG POPULATE {keys} key {value_bytes}\r\n");
        connection.send(command.as_bytes())?;
        match connection.line()? {
            b"+OK" => Ok(()),
            line => Err(ClientError::Wrong(String::from_utf8_lossy(line).into_owned())),
        }
    };
    let filled = lab.client().inside(populate);
    filled.map_err(|error| LabError::Io {
        doing: format!("fill Redis with {keys} keys"),
        source: std::io::Error::other(error),
    })
}

/// Waits for a checkpoint that was begun after `instant`: two commits later at the latest.
fn epoch_after(primary: &Process, instant: Instant) -> Result<(), LabError> {
    let mut later = 0;
    let found = primary.stdout().find(FILL_AT_MOST, |line| {
        later += usize::from(line.at > instant && numbers(&line.text).is_some());
        (later == 3).then_some(())
    });
    let what = "a checkpoint of all that".to_owned();
    found.ok_or(LabError::Deadline { what, waited: FILL_AT_MOST })
}

/// The numbers of an `epoch` event.
fn numbers(line: &str) -> Option<Vec<(String, f64)>> {
    let value: serde_json::Value = serde_json::from_str(line).ok()?;
    let members = value.as_object()?;
    (members.get("event")?.as_str()? == "epoch").then_some(())?;
    Some(members.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect())
}

/// What was told of the checkpoints of some time, by name.
fn epochs(primary: &Process, (start, end): (Instant, Instant)) -> BTreeMap<String, Vec<f64>> {
    let mut values: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for line in primary.stdout().lines() {
        if (start..end).contains(&line.at) {
            for (name, value) in numbers(&line.text).unwrap_or_default() {
                if name == "stop_ns" {
                    let since_stop = line.at.since(primary.instant(value as u64));
                    values.entry("commit_ms".to_owned()).or_default().push(millis(since_stop));
                }
                values.entry(name).or_default().push(value);
            }
        }
    }
    values
}

fn measured(
    lanes: &[LaneRecord<Mix>],
    primary: &Process,
    (start, end): (Instant, Instant),
) -> Measured {
    let values = epochs(primary, (start, end));
    let replies = lanes.iter().flat_map(|lane| &lane.replies);
    let good = replies
        .filter(|reply| reply.outcome == Outcome::Good && (start..end).contains(&reply.done));
    let latencies: Vec<f64> = good.map(|reply| millis(reply.latency())).collect();
    Measured {
        epochs: values.into_iter().map(|(name, values)| (name, Spread::of(values))).collect(),
        replies_per_s: latencies.len() as f64 / end.since(start).as_secs_f64(),
        latency_ms: Spread::of(latencies),
        used: [0.0; 2],
    }
}

/// Reads and writes of random keys; counts replies, checks no values.
struct Mix {
    dice: Dice,
    keys: u64,
    writes: f64,
    wrote: bool,
}

impl Mix {
    fn new(bench: &PauseBench, lane: u64) -> Mix {
        let dice = Dice::new(7).part(lane);
        Mix { dice, keys: bench.keys, writes: bench.writes, wrote: false }
    }
}

impl Session for Mix {
    fn ask(&mut self, request: &mut Vec<u8>) {
        let key = format!("key:{}", self.dice.below(self.keys));
        self.wrote = self.dice.chance(self.writes);
        if self.wrote {
            let value = format!("{:0VALUE_BYTES$}", self.dice.roll());
            Protocol::Redis.put_set(request, &key, &value);
        } else {
            Protocol::Redis.put_get(request, &key);
        }
    }

    fn take(&mut self, connection: &mut Connection) -> Result<(), ClientError> {
        if self.wrote {
            return Protocol::Redis.take_set(connection);
        }
        let line = connection.line()?;
        let count = line.strip_prefix(b"$").and_then(|count| std::str::from_utf8(count).ok());
        let count: i64 = count
            .and_then(|count| count.parse().ok())
            .ok_or_else(|| ClientError::Wrong(String::from_utf8_lossy(line).into_owned()))?;
        if let Ok(count) = usize::try_from(count) {
            connection.bytes(count + 2)?;
        }
        Ok(())
    }

    fn close(&mut self, _connection: &mut Connection) -> Result<(), ClientError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_taken_from_sorted_values() {
        let spread = Spread::of((1..=101).rev().map(f64::from).collect());
        assert_eq!(spread, Spread { mean: 51.0, p50: 51.0, p99: 100.0, max: 101.0, count: 101 });
        assert_eq!(Spread::of(vec![]), Spread::default());
    }

    #[test]
    fn a_median_lies_in_the_middle() {
        assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![9.0, 1.0, 2.0, 4.0]), 3.0);
        assert_eq!((median(vec![7.0]), median(vec![])), (7.0, 0.0));
    }

    #[test]
    fn only_numbers_of_epochs_count() {
        let line = r#"{"event":"epoch","epoch":3,"pause_us":700.5,"note":"x"}"#;
        let expected = [("epoch".to_owned(), 3.0), ("pause_us".to_owned(), 700.5)];
        assert_eq!(numbers(line).unwrap(), expected);
        assert_eq!(numbers(r#"{"event":"exit","status":0}"#), None);
    }
}
