//! `cargo xtask bench first-reply`: how long the clients of a large Redis wait until one of them
//! has a reply, when it comes back from a store at the end of a line.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hotspare_torture::bench::Spread;
use hotspare_torture::dice::Dice;
use hotspare_torture::lab::{LAB_DIR, Lab, Process, SERVICE_CIDR, SERVICE_V4, lock};
use serde::Serialize;
use serde_json::json;

use super::{PATIENCE, PLACE, Recorded, Restart, SEVERAL, Speed, at_once, kill, went};
use crate::bench::report::{Common, Report, Table, wrapped};
use crate::pool::side_by_side;
use crate::tree;

/// Of the guest.
pub const NAME: &str = "redis";
const PORT: u16 = 7005;
/// Filling ten million keys takes a while on a busy machine.
const FILLING: Duration = Duration::from_secs(600);
/// When clients try again.
const AGAIN: Duration = Duration::from_millis(2);

#[derive(Debug, Args)]
pub struct ReplyArguments {
    #[command(flatten)]
    common: Common,
    /// Keys, with values of 40 bytes that do not repeat
    #[arg(long, default_value_t = 10_000_000)]
    keys: u64,
    /// Lines: megabytes a second, and milliseconds of a round trip
    #[arg(long, value_delimiter = ',', default_value = "32:70,7:200")]
    lines: Vec<String>,
    /// Restarts of each kind, in turns
    #[arg(long, default_value_t = 20)]
    count: usize,
    /// Another hotspare program that restores from the same checkpoints, in turns with this one
    #[arg(long)]
    beside: Option<PathBuf>,
}

/// How one restart went.
#[derive(Clone, Debug, Default, Serialize)]
struct Reply {
    reply_s: f64,
    #[serde(flatten)]
    restart: Restart,
}

const ABOUT: &str = "A Redis with that many keys (values of 40 bytes that do not repeat) runs \
    under `hotspare run --store`, while a client asks for random keys and others connect, ask for \
    one and leave, five a second, and its host dies; `hotspare restore` brings it back on another \
    host, at the end of a line as above. First reply: from the start of `restore` until a client \
    that connects anew and asks for a random key has its value, which is compared with what it \
    should be. All first: with `--load-first`.";

const COLUMNS: [&str; 9] = [
    "line",
    "keys",
    "image MB",
    "sent MB",
    "first reply, all first s p50 / p99",
    "first reply s p50 / p99",
    "times faster",
    "runs s p50 / p99",
    "all there s p50 / p99",
];

impl ReplyArguments {
    pub fn with(common: Common) -> Self {
        let lines = ["32:70", "7:200"].map(str::to_owned).into();
        Self { common, keys: 10_000_000, lines, count: 20, beside: None }
    }

    /// How many keys, over which lines, how often.
    fn plan(&self) -> Result<(u64, Vec<Speed>, usize)> {
        match self.common.quick {
            true => Ok((20_000, vec![(200, Duration::from_millis(1))], 1)),
            false => Ok((self.keys, super::speeds(&self.lines)?, self.count.max(1))),
        }
    }
}

/// Fills, stores, kills and restores it, and shows how long its clients waited.
pub fn replies(arguments: &ReplyArguments) -> Result<()> {
    ensure!(arguments.common.against.is_none(), "first-reply does not compare commits");
    let hotspare = tree::build_hotspare()?;
    let mut report = Report::new("first-reply", &arguments.common)?;
    let (keys, speeds, count) = arguments.plan()?;
    let recorded = record(&hotspare, keys)?;
    let mut table = Table::new(&COLUMNS);
    for speed in speeds {
        let own: &Path = &recorded.hotspare;
        let mut kinds: Vec<(&Path, &[&str])> = vec![(own, &["--load-first"]), (own, &[])];
        kinds.extend(arguments.beside.iter().map(|other| (other.as_path(), &[][..])));
        let all = rounds(&recorded, &kinds, speed, (keys, count))?;
        let of = |kind: usize| all.iter().filter(move |(of, ..)| *of == kind);
        let [first, behind] = [0, 1]
            .map(|kind| -> Vec<Reply> { of(kind).map(|(_, reply, _)| reply.clone()).collect() });
        let sent = of(1).next_back().map_or(0.0, |(.., sent)| *sent);
        let delay_ms = speed.1.as_millis() as u64;
        for (start, replies) in [("loaded", &first), ("early", &behind)] {
            let of = json!({ "keys": keys, "start": start, "mb_per_s": speed.0,
                "round_trip_ms": delay_ms });
            report.add(of, replies)?;
        }
        let line = format!("{} MB/s, {delay_ms} ms", speed.0);
        table.row(row(line, keys, sent, (&first, &behind)));
    }
    let about = format!("{ABOUT} Each {count} times, in turns. {SEVERAL}");
    report.finish("first-reply", &format!("{}\n{}", wrapped(&about), table.text))
}

/// Restarts of each kind, in turns: which kind, how it went, and the megabytes sent for it.
fn rounds(
    recorded: &Recorded,
    kinds: &[(&Path, &[&str])],
    speed: Speed,
    (keys, count): (u64, usize),
) -> Result<Vec<(usize, Reply, f64)>> {
    let jobs = at_once(speed);
    let sites = (0..jobs).map(|_| recorded.elsewhere()).collect::<Result<Vec<_>>>()?;
    let (sites, went) = (Mutex::new(sites), Mutex::new(Vec::new()));
    side_by_side(jobs, 0..count, |round| {
        let site = lock(&sites).pop().expect("there are as many as are at work");
        for (kind, how) in kinds.iter().enumerate() {
            let one = restart(&site, *how, speed, keys, round as u64);
            println!("round {round}, {how:?}: {one:?}");
            lock(&went).push(one.map(|(reply, sent)| (kind, reply, sent)));
        }
        lock(&sites).push(site);
    });
    went.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().collect()
}

/// Of a line: everything first, and what `restore` does.
fn row(line: String, keys: u64, sent: f64, (first, behind): (&[Reply], &[Reply])) -> [String; 9] {
    let spread = |all: &[Reply], of: fn(&Reply) -> f64| Spread::of(all.iter().map(of).collect());
    let both = |of: Spread| format!("{:.2} / {:.2}", of.p50, of.p99);
    let image = |one: &Reply| one.restart.before_mb + one.restart.behind_mb;
    let reply_s = |one: &Reply| one.reply_s;
    let (all_first, early) = (spread(first, reply_s), spread(behind, reply_s));
    [
        line,
        keys.to_string(),
        format!("{:.0}", spread(first, image).p50),
        format!("{sent:.0}"),
        both(all_first),
        both(early),
        format!("{:.1}", all_first.p50 / early.p50),
        both(spread(behind, |one| one.restart.latency_s)),
        both(spread(behind, |one| one.restart.whole_s)),
    ]
}

fn server() -> Vec<String> {
    let server = ["redis-server", "--save", "", "--protected-mode", "no", "--port"];
    let port = PORT.to_string();
    server.into_iter().chain([port.as_str()]).map(str::to_owned).collect()
}

fn record(hotspare: &Path, keys: u64) -> Result<Recorded> {
    let more = ["--track", "5s", "--store-every", "5s", "--service-address", SERVICE_CIDR];
    Recorded::make(hotspare, (NAME, &server()), &more, |lab, primary| {
        let mut client = connect(lab, primary)?;
        fill(&mut client, keys).context("fill it")?;
        // So that it is known what it touches when it serves: two windows, and the one that was
        // open while it was filled.
        let (windows, began) = (windows(primary) + 3, Instant::now());
        let (mut dice, mut known, mut looked) = (Dice::new(1), None, Instant::now());
        let is_stored = |since| anyhow::Ok(increments(lab)?.iter().any(|time| *time > since));
        loop {
            ensure!(began.elapsed() < FILLING, "what it holds is not stored");
            client.check(1 + dice.roll() % keys)?;
            if looked.elapsed() < Duration::from_millis(200) {
                continue;
            }
            looked = Instant::now();
            // As clients of a server that runs come and go.
            connect(lab, primary)?.check(1 + dice.roll() % keys)?;
            match known {
                None => known = (self::windows(primary) >= windows).then(now_ms),
                Some(since) if is_stored(since + 1000)? => return Ok(()),
                Some(_) => {}
            }
        }
    })
}

/// Stores such a Redis, to which a client writes so often a second, until there are more than so
/// many increments; in which directory, and since when it was full.
pub fn record_writes(
    hotspare: &Path,
    keys: u64,
    writes: u64,
    every: Duration,
    count: usize,
) -> Result<(Lab, PathBuf, u64)> {
    let every_ms = format!("{}ms", every.as_millis());
    let more = ["--track", "60s", "--service-address", SERVICE_CIDR, "--store-every", &every_ms];
    let mut filled = 0;
    let recorded = Recorded::make(hotspare, (NAME, &server()), &more, |lab, primary| {
        let mut client = connect(lab, primary)?;
        fill(&mut client, keys).context("fill it")?;
        filled = now_ms() + every.as_millis() as u64;
        let (began, mut dice) = (Instant::now(), Dice::new(2));
        let later = || anyhow::Ok(increments(lab)?.iter().filter(|time| **time > filled).count());
        let wanted = every * (count as u32 + 1);
        let mut next = Instant::now();
        while began.elapsed() < wanted || later()? <= count {
            ensure!(began.elapsed() < wanted + FILLING, "what it holds is not stored");
            let key = 1 + dice.roll() % keys;
            client.ask(&["SET", &format!("key:{key}"), &value(dice.roll())])?;
            next += Duration::from_secs(1) / writes.max(1) as u32;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        Ok(())
    })?;
    let place = recorded.lab.host(0).outside(format!("{LAB_DIR}/served/{PLACE}"));
    Ok((recorded.lab, place, filled))
}

/// How often it has become known what it touches.
fn windows(primary: &Process) -> usize {
    let lines = primary.stdout().lines().into_iter();
    lines.filter(|line| line.text.contains("\"event\":\"tracked\"")).count()
}

/// When each checkpoint was taken that stands on another.
fn increments(lab: &Lab) -> Result<Vec<u64>> {
    let folder = format!("{LAB_DIR}/served/{PLACE}/{NAME}/checkpoints");
    let entries = std::fs::read_dir(lab.host(0).outside(folder)).context("look into the store")?;
    let mut times = Vec::new();
    for entry in entries {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.ends_with("-whole") {
            times.extend(name.split('-').nth(2).and_then(|time| time.parse::<u64>().ok()));
        }
    }
    Ok(times)
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64)
}

fn fill(client: &mut Client, keys: u64) -> Result<()> {
    const AT_ONCE: u64 = 50_000;
    let script = "for i = ARGV[1], ARGV[2] do \
        redis.call('SET', string.format('key:%d', i), redis.sha1hex(string.format('%d', i))) end \
        return 1";
    for from in (1..=keys).step_by(AT_ONCE as usize) {
        let to = (from + AT_ONCE - 1).min(keys).to_string();
        client.ask(&["EVAL", script, "0", &from.to_string(), &to])?;
    }
    // Each look moves its table on a bit, until that has its final size: as of a server that has
    // been running for a while.
    let script = "local n = 0 for i = ARGV[1], ARGV[2] do \
        n = n + redis.call('EXISTS', string.format('key:%d', i)) end return n";
    for from in (1..=keys).step_by(AT_ONCE as usize) {
        let to = (from + AT_ONCE - 1).min(keys);
        let has = client.ask(&["EVAL", script, "0", &from.to_string(), &to.to_string()])?;
        ensure!(has == format!(":{}", to - from + 1), "of keys {from} to {to} it has {has}");
    }
    Ok(())
}

/// The value of a key, as the script makes it.
fn value(key: u64) -> String {
    let digest =
        ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, key.to_string().as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Speaks as much of Redis as is needed.
struct Client {
    stream: TcpStream,
    answers: BufReader<TcpStream>,
}

impl Client {
    fn connect() -> Result<Self> {
        let server = SocketAddr::new(IpAddr::V4(SERVICE_V4), PORT);
        let stream = TcpStream::connect_timeout(&server, Duration::from_millis(100))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let answers = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, answers })
    }

    fn ask(&mut self, words: &[&str]) -> Result<String> {
        let each = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
        let command = format!("*{}\r\n{}", words.len(), each.collect::<String>());
        self.stream.write_all(command.as_bytes())?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let line = line.trim_end();
        let Some(length) = line.strip_prefix('$') else { return Ok(line.to_owned()) };
        let Ok(length) = length.parse::<usize>() else { bail!("there is nothing") };
        let mut bytes = vec![0; length + 2];
        self.answers.read_exact(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }

    /// Asks for a key.
    fn check(&mut self, key: u64) -> Result<()> {
        let has = self.ask(&["GET", &format!("key:{key}")])?;
        ensure!(has == value(key), "key {key} has the value {has:?}");
        Ok(())
    }
}

/// Tries until there is a server.
fn connect(lab: &Lab, agent: &Process) -> Result<Client> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Ok(client) = lab.client().inside(Client::connect) {
            return Ok(client);
        }
        if agent.try_wait().is_some() || Instant::now() > deadline {
            bail!("nobody answers:\n{}", agent.said());
        }
        std::thread::sleep(AGAIN);
    }
}

/// One restart, and the megabytes that were sent for it.
fn restart(
    recorded: &Recorded,
    (hotspare, how): (&Path, &[&str]),
    speed: Speed,
    keys: u64,
    round: u64,
) -> Result<(Reply, f64)> {
    let key = 1 + Dice::new(round).roll() % keys;
    let began = Instant::now();
    let (restored, line) = recorded.begin(hotspare, how, speed)?;
    connect(&recorded.lab, &restored)?.check(key)?;
    let reply_s = began.elapsed().as_secs_f64();
    let restart = went(recorded.lab.host(1), &restored, &line)?;
    kill(&restored)?;
    let sent = line.bytes.load(std::sync::atomic::Ordering::Relaxed) as f64;
    Ok((Reply { reply_s, restart }, sent / f64::from(1 << 20)))
}
