//! The command line.

use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand, ValueEnum};
use hotspare_cluster::{Action, Config, Event, Node, Quorum};
use hotspare_image::Term;
use hotspare_net::takeover::ServiceAddress;
use hotspare_process::lazy::Start;
use hotspare_replica::{HostRole, Identity, Security};
use hotspare_store::Address;

use crate::agent::Agent;
use crate::arbiter::{Arbiter, Holds, Place};
use crate::brain::{self, Brain};
use crate::control;
use crate::history::{self, What};
use crate::hooks::Hook;
use crate::join::keep_joining;
use crate::launch::{Launch, Network, launch, raise_descriptor_limit};
use crate::link;
use crate::mailbox::mailbox;
use crate::manual::{self, help};
use crate::metrics;
use crate::output;
use crate::preflight;
use crate::primary::Primary;
use crate::rehearsal::{Plan, keep_rehearsing};
use crate::report::{Reporter, size};
use crate::rhythm::Epochs;
use crate::service;
use crate::settings::{FileRule, Guarantee, PacketPath, Settings, answers_already};
use crate::spare::{Decision, Spare, Stale};
use crate::stored::peer::{self, Elsewhere};
use crate::stored::restore::{At, Beginning, Chosen, Restoring};
use crate::stored::{self, StoreArguments};
use crate::{facts, takeover};

/// A hot spare for any Linux program.
///
/// On the spare host:    hotspare spare --listen 0.0.0.0:7070 --keys DIR
/// On the primary host:  hotspare run --spare SPARE:7070 --keys DIR -- redis-server
///
/// While the program runs, small checkpoints flow to a stopped copy of it on the spare. When the
/// program or its host dies, the copy goes on: same memory, process numbers, files, sockets.
#[derive(Debug, Parser)]
#[command(name = "hotspare", version, about, long_about, verbatim_doc_comment)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a program and keep spares of it up to date.
    #[command(after_help = help::RUN)]
    Run(RunArguments),
    /// Be a spare: hold the ghost of a program and take over when its primary is gone.
    #[command(after_help = help::SPARE)]
    Spare(SpareArguments),
    /// Start a guest anew from a stored checkpoint, on any host that qualifies. It is a primary
    /// like any other then.
    #[command(after_help = help::RESTORE)]
    Restore(RestoreArguments),
    /// Show what is inside a stored checkpoint.
    #[command(after_help = help::INSPECT)]
    Inspect(stored::show::InspectArguments),
    /// Say whether this kernel, and a program, can be protected.
    #[command(after_help = help::CHECK)]
    Check(preflight::CheckArguments),
    /// Make a certificate authority and certificates for the hosts.
    #[command(after_help = help::KEYS)]
    Keys {
        /// Directory for the keys; copy each host's files there.
        directory: PathBuf,
        /// Names of the hosts.
        #[arg(required = true)]
        hosts: Vec<String>,
    },
    /// Show the agents of this host.
    #[command(after_help = help::STATUS)]
    Status {
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        place: control::Where,
    },
    /// Tell what happens to an agent of this host, until it ends.
    #[command(after_help = help::EVENTS)]
    Events {
        /// Which guest, where several agents run on this host.
        #[arg(long)]
        guest: Option<String>,
        /// Also each checkpoint.
        #[arg(long)]
        epochs: bool,
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        place: control::Where,
    },
    /// Move the guest of this host's primary to its spare, and wait until it runs there. Nothing
    /// is lost; clients wait for some milliseconds.
    #[command(after_help = help::SWITCHOVER)]
    Switchover {
        /// Which guest, where several run on this host.
        #[arg(long)]
        guest: Option<String>,
        /// The address of the spare's host, where there are several. By default the first in the
        /// queue.
        #[arg(long, value_name = "ADDRESS")]
        to: Option<IpAddr>,
        #[command(flatten)]
        place: control::Where,
    },
    /// Try the spare of this host: let a copy of its ghost run for a moment, cut off from the
    /// world, run a probe against it, and throw it away. The ghost itself is not touched.
    #[command(after_help = help::REHEARSE)]
    Rehearse {
        /// Which guest's, where several spares run on this host.
        #[arg(long)]
        guest: Option<String>,
        #[command(flatten)]
        trial: Trial,
        /// One JSON object.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        place: control::Where,
    },
    /// Stop protecting the guest of this host's primary, on purpose: no more checkpoints, and
    /// spares forget their ghosts. If the host dies then, the guest is lost.
    #[command(after_help = help::PAUSE)]
    Pause {
        /// Which guest, where several run on this host.
        #[arg(long)]
        guest: Option<String>,
        /// For the history.
        #[arg(long, default_value = "")]
        reason: String,
        #[command(flatten)]
        place: control::Where,
    },
    /// Protect the guest of this host's primary again, by a full copy to its spares.
    Resume {
        /// Which guest, where several run on this host.
        #[arg(long)]
        guest: Option<String>,
        #[command(flatten)]
        place: control::Where,
    },
    /// Show what became of the protection of this host's guests: failovers, moves, gaps, and what
    /// was lost.
    #[command(after_help = help::HISTORY)]
    History {
        /// Only of this guest.
        #[arg(long)]
        guest: Option<String>,
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
        /// Where the agents keep it.
        #[arg(long, default_value = history::STATE_DIR, env = "HOTSPARE_STATE")]
        state_dir: PathBuf,
        /// Show what a store has instead: guests, who stored them, checkpoints and their sizes.
        #[arg(long, value_name = "URL")]
        store: Option<hotspare_store::Address>,
        #[command(flatten)]
        place: control::Where,
    },
    /// Show a failover on this machine: two simulated hosts, a real Redis, a kill.
    #[command(after_help = help::DEMO)]
    Demo {
        /// Keys in the Redis.
        #[arg(long, default_value_t = 100_000)]
        keys: usize,
        /// Time between checkpoints.
        #[arg(long, default_value = "100ms", value_parser = duration)]
        epoch: Duration,
        /// What clients may notice; see `hotspare run --help`.
        #[arg(long, value_enum, default_value_t)]
        guarantee: Guarantee,
        /// Where the picture goes.
        #[arg(long, default_value = "hotspare-demo.svg")]
        picture: PathBuf,
    },
    /// Print a completion script for a shell.
    #[command(after_help = help::COMPLETIONS)]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a directory.
    Man {
        /// The directory, as in /usr/local/share/man/man1.
        directory: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Common {
    /// Tell what happens as JSON, one object a line, on standard output.
    #[arg(long)]
    json: bool,
    /// Directory of this host's keys, made by `hotspare keys`.
    #[arg(long, env = "HOTSPARE_KEYS")]
    keys: Option<PathBuf>,
    /// Name of this host among the keys.
    #[arg(long, default_value = "host", env = "HOTSPARE_NAME")]
    name: String,
    /// Send the guest's memory in plain text over the network. Only where nobody else can listen.
    #[arg(long)]
    insecure: bool,
    /// Bridge to plug the service address into; without it the address is routed through the
    /// interface whose network it lies in.
    #[arg(long)]
    service_bridge: Option<String>,
    /// Command to run when this host takes the service over, or is no longer primary; see README
    /// for its environment.
    #[arg(long)]
    takeover_hook: Option<String>,
    /// How long nothing may be heard of the other host before it counts as dead: at least 90ms.
    /// Give more on hosts that stall, as crowded virtual machines do: the spare would replace a
    /// primary that lives. The same on all hosts.
    #[arg(long, default_value = "90ms", value_parser = silence)]
    silence: Duration,
    /// Where the history of the guest is kept, in a directory of its name.
    #[arg(long, default_value = history::STATE_DIR, env = "HOTSPARE_STATE")]
    state_dir: PathBuf,
    /// Serve metrics for Prometheus at http://ADDR/metrics, as in 127.0.0.1:9707; a port alone is
    /// one of loopback. Whoever asks from another host needs a certificate from `hotspare keys`,
    /// unless there are no --keys and --insecure is given.
    #[arg(long, value_name = "ADDR", env = "HOTSPARE_METRICS", value_parser = metrics_address)]
    metrics: Option<String>,
    /// Who decides which host may run the guest: `etcd://HOST:PORT[,HOST:PORT]/PREFIX`, or
    /// `etcds://…?ca=FILE[&cert=FILE&key=FILE]` for TLS, or
    /// `s3://BUCKET/PREFIX[?endpoint=URL&region=NAME]`. Name and password for etcd are taken from
    /// HOTSPARE_ARBITER_USER and HOTSPARE_ARBITER_PASSWORD, keys for S3 from AWS_ACCESS_KEY_ID and
    /// AWS_SECRET_ACCESS_KEY. `none`: nobody decides; if both hosts live and cannot hear each
    /// other, both run the guest, and clients reach one or the other. The same on all hosts.
    #[arg(long, default_value = "none", env = "HOTSPARE_ARBITER", hide_env_values = true)]
    arbiter: Place,
    /// How long a primary may go on without the arbiter before nothing leaves its guest any more
    /// (1s with etcd, 10s with S3). With `timeline` a failover takes as long. With `output-commit`
    /// no failover waits for it, and a primary whose spares acknowledge goes on for a minute.
    #[arg(long, value_parser = lease)]
    lease: Option<Duration>,
    /// Also serve the control interface at this address (HOST:PORT) to those who have a
    /// certificate; needs --keys. On this host it is served in any case.
    #[arg(long, value_name = "ADDR", requires = "keys")]
    control: Option<String>,
    /// Keep the newest of what this agent stores (--store) in its own memory as well, up to this
    /// size (2G): `restore --pages` on another host gets it from there by the control interface,
    /// whatever becomes of the store. Everything takes as much as is stored of a guest; 0: none.
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = peer::bytes)]
    page_memory: u64,
}

impl Common {
    fn hook(&self) -> Hook {
        Hook { command: self.takeover_hook.clone(), bridge: self.service_bridge.clone() }
    }
}

#[derive(Debug, Args)]
struct RunArguments {
    #[command(flatten)]
    common: Common,
    /// A spare to keep up to date (HOST:PORT); may be given several times.
    #[arg(long)]
    spare: Vec<String>,
    /// Also accept spares that dial here.
    #[arg(long)]
    listen: Option<String>,
    /// The guest's address and prefix, as in 10.0.0.50/24; it moves with the guest.
    #[arg(long)]
    service_address: Option<ServiceAddress>,
    /// What clients may notice of a failover. `timeline`: nothing is held back, and they may find
    /// the guest up to one epoch in the past. `output-commit`: whatever leaves the guest waits some
    /// milliseconds until a spare knows the state it came from, and connections go on.
    #[arg(long, value_enum, default_value_t)]
    guarantee: Guarantee,
    /// With `output-commit`: let packets reach clients through a spare's host, so that an answer
    /// needs no word back from there and clients need not repeat themselves after a failover
    /// (`spare`), or from the primary's host (`direct`). By default `spare`, but `direct` with a
    /// --takeover-hook, which brings clients to the primary's host.
    #[arg(long, value_enum)]
    path: Option<PacketPath>,
    /// With `output-commit` and several spares: how many of them must have a state before output
    /// that came from it leaves. The others stand by: they follow, and one of them counts as soon
    /// as one that did is gone. `1`: hosts may die one after the other, but not the primary's and
    /// that spare's at once. `all`: any of them takes over, and the slowest sets the pace.
    #[arg(long, default_value = "all", value_name = "1|majority|all")]
    commit_on: Quorum,
    /// Time between checkpoints; with `output-commit` the longest, since waiting output wants one.
    /// `auto`: from 10 ms to 500 ms, so that checkpoints take a twentieth of all time.
    #[arg(long, default_value = "100ms", value_parser = Epochs::parse, value_name = "TIME|auto")]
    epoch: Epochs,
    /// `replicate:/PATH`: changes travel with the checkpoints. `shared:/PATH`: both hosts see the
    /// same storage. Everything else is read-only for the guest and must be equal on both hosts.
    #[arg(long)]
    files: Vec<FileRule>,
    /// Copy all memory at every checkpoint while the guest stands still, as a measure of what
    /// pre-copy is worth.
    #[arg(long)]
    stop_and_copy: bool,
    #[command(flatten)]
    store: StoreArguments,
    /// Working directory of the program.
    #[arg(long, default_value = "/")]
    directory: String,
    /// Name of the guest, shown by status.
    #[arg(long)]
    guest: Option<String>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

#[derive(Debug, Args)]
struct RestoreArguments {
    #[command(flatten)]
    common: Common,
    /// A spare to keep up to date (HOST:PORT); may be given several times.
    #[arg(long)]
    spare: Vec<String>,
    /// Also accept spares that dial here.
    #[arg(long)]
    listen: Option<String>,
    /// Which checkpoint: an epoch, a time (2026-11-22T18:30:00, UTC: the newest of then), or so
    /// long ago (10m).
    #[arg(long, default_value = "newest", value_name = "EPOCH|TIME")]
    at: At,
    /// Give the guest another address and prefix, beside one that has its own still. Its
    /// connections end.
    #[arg(long, value_name = "ADDRESS/PREFIX")]
    service_address: Option<ServiceAddress>,
    /// Another name for the guest, where one of this name runs on this host.
    #[arg(long, value_name = "NAME")]
    rename: Option<String>,
    /// Where its memory can be had besides, asked before the store: a copy of the store (file:// or
    /// s3://), or an agent with --page-memory, by its --control address (HOST:PORT; needs --keys)
    /// or its socket on this host (/run/hotspare/PID.sock). May be given several times. Each block
    /// is compared with its hash; what one place has not, or not any more, comes from the next.
    #[arg(long, value_name = "PLACE")]
    pages: Vec<Elsewhere>,
    /// When it runs: when what it touched in its first moments is there, and it may have to wait
    /// for more (early); when it will find what it touches in time, by the bandwidth that is
    /// measured meanwhile (smooth); or when all that it was seen to touch is there (touched).
    #[arg(long, value_enum, default_value_t = StartArgument::Early, value_name = "WHEN")]
    start: StartArgument,
    /// Bring all of its memory before it runs, not behind it.
    #[arg(long, conflicts_with = "start")]
    load_first: bool,
    #[command(flatten)]
    store: StoreArguments,
    /// The store it is in.
    #[arg(value_name = "STORE")]
    from: Address,
    /// The guest.
    guest: String,
}

/// What a rehearsal tries.
#[derive(Debug, Args)]
struct Trial {
    /// A command for `sh -c` that succeeds if the copy does its work. It runs as root inside of the
    /// copy's namespaces: it reaches the guest's address and files, and nothing else, and has
    /// HOTSPARE_ADDRESS, HOTSPARE_GUEST and HOTSPARE_EPOCH.
    #[arg(long, value_name = "COMMAND", env = "HOTSPARE_PROBE")]
    probe: Option<String>,
    /// How long the copy runs at least.
    #[arg(long = "for", value_name = "TIME", default_value = "1s", value_parser = long_duration)]
    run: Duration,
    /// How long the probe may take.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = long_duration)]
    patience: Duration,
    /// Directory on this host for the copies of replicated directories, which are made in memory
    /// otherwise.
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
}

impl Trial {
    fn plan(self) -> Plan {
        let Self { probe, run, patience, scratch } = self;
        Plan { probe, run, patience, scratch }
    }
}

#[derive(Debug, Args)]
struct SpareArguments {
    #[command(flatten)]
    common: Common,
    /// Address and port to listen on for primaries, and for spares once it is primary itself. With
    /// --join alone, any port on any address.
    #[arg(long, required_unless_present = "join")]
    listen: Option<String>,
    /// A primary to dial instead of waiting for one (HOST:PORT).
    #[arg(long)]
    join: Option<String>,
    /// Try the spare this often, as in 10m: see `hotspare rehearse`, whose options are the
    /// following four.
    #[arg(long, value_name = "TIME", value_parser = long_duration)]
    rehearse: Option<Duration>,
    #[command(flatten)]
    trial: Trial,
}

/// Three heartbeats are the least.
fn silence(text: &str) -> Result<Duration, String> {
    const LEAST: Duration = Duration::from_millis(90);
    let given = duration(text)?;
    if given < LEAST {
        return Err("less than 90ms: heartbeats come every 30 ms, and three may be missed".into());
    }
    Ok(given)
}

/// A port alone is one of loopback.
fn metrics_address(text: &str) -> Result<String, String> {
    let port = text.strip_prefix(':').unwrap_or(text);
    match port.parse::<u16>() {
        Ok(port) => Ok(format!("127.0.0.1:{port}")),
        Err(_) if text.contains(':') => Ok(text.to_owned()),
        Err(_) => Err("write ADDRESS:PORT, as in 127.0.0.1:9707, or a port".into()),
    }
}

/// Time for some requests.
fn lease(text: &str) -> Result<Duration, String> {
    let given = duration(text)?;
    if given < Duration::from_millis(300) {
        return Err("less than 300ms: a slow request would stop the guest's output".into());
    }
    Ok(given)
}

pub fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is not a time, as in 100ms"))?;
    let seconds = match unit {
        "us" => number / 1e6,
        "ms" => number / 1e3,
        "s" => number,
        _ => return Err(format!("{text:?} needs a unit: us, ms or s")),
    };
    if !(0.0005..=3600.0).contains(&seconds) {
        return Err(format!("{text:?} is out of range: 500us to 1h"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Times of people: also minutes and hours.
pub fn long_duration(text: &str) -> Result<Duration, String> {
    let minutes = text.strip_suffix('m').map(|number| (number, 60.0));
    let hours = text.strip_suffix('h').map(|number| (number, 3600.0));
    let Some((number, factor)) = minutes.or(hours) else { return duration(text) };
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is not a time, as in 10m"))?;
    let seconds = number * factor;
    if !(1.0..=7.0 * 86_400.0).contains(&seconds) {
        return Err(format!("{text:?} is out of range: up to 168h"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// `HOTSPARE_LOG`. Where it is silent: errors, but none of the FUSE library, which complains of
/// every call whose caller was killed.
fn log_filter() -> tracing_subscriber::EnvFilter {
    tracing_subscriber::EnvFilter::try_from_env("HOTSPARE_LOG")
        .unwrap_or_else(|_| "error,fuser=off".into())
}

/// Does what the command line says; returns the exit status.
pub fn run(cli: Cli) -> anyhow::Result<u8> {
    let log = tracing_subscriber::fmt().with_env_filter(log_filter());
    // What cannot be written is lost: an agent lives on where a disk is full.
    log.with_writer(std::io::stderr).log_internal_errors(false).init();
    match cli.command {
        Command::Run(arguments) => run_guest(arguments),
        Command::Spare(arguments) => run_spare(arguments),
        Command::Check(arguments) => Ok(preflight::check(&arguments)),
        Command::Keys { directory, hosts } => {
            for path in hotspare_replica::keys::issue(&directory, &hosts)? {
                println!("{}", path.display());
            }
            Ok(0)
        }
        Command::Status { json, place } => control::status(&place, json),
        Command::Events { guest, epochs, json, place } => {
            control::events(&place, guest.as_deref(), epochs, json)
        }
        Command::Switchover { guest, to, place } => {
            control::switchover(&place, guest.as_deref(), to)
        }
        Command::Rehearse { guest, trial, json, place } => {
            control::rehearse(&place, guest.as_deref(), trial.plan(), json)
        }
        Command::Pause { guest, reason, place } => {
            control::protection(&place, guest.as_deref(), false, &reason)
        }
        Command::Resume { guest, place } => control::protection(&place, guest.as_deref(), true, ""),
        Command::Restore(arguments) => restore_guest(arguments),
        Command::Inspect(arguments) => stored::show::inspect(&arguments),
        Command::History { guest, json, store: Some(store), .. } => {
            stored::show::history(&store, guest.as_deref(), json)
        }
        Command::History { guest, json, state_dir, place, .. } => {
            match control::history(&place, json)? {
                Some(status) => Ok(status),
                None => history::show(&state_dir, guest.as_deref(), json),
            }
        }
        Command::Completions { shell } => Ok(manual::completions(shell)),
        Command::Man { directory } => manual::pages(&directory),
        Command::Demo { keys, epoch, guarantee, picture } => {
            let mut options = hotspare_torture::demo::DemoOptions::new(std::env::current_exe()?);
            (options.keys, options.epoch, options.picture) = (keys, epoch, picture);
            if guarantee == Guarantee::OutputCommit {
                options.hold_output();
            }
            hotspare_torture::demo::run(&options, &mut std::io::stdout())?;
            Ok(0)
        }
    }
}

/// Listens, or says what to do about it.
fn listen(address: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                "another program has this port: end it, or choose another (`ss -tlnp` shows it)"
            }
            std::io::ErrorKind::AddrNotAvailable => "no interface of this host has this address",
            std::io::ErrorKind::InvalidInput => "write ADDRESS:PORT, as in 0.0.0.0:7070",
            _ => "write ADDRESS:PORT with an address of this host, as in 0.0.0.0:7070",
        };
        anyhow::anyhow!("listen on {address}: {error}: {hint}")
    })
}

/// Begins to tell how things stand: to Prometheus, to the service manager.
fn tell_others(agent: &Agent, metrics: Option<TcpListener>) -> anyhow::Result<()> {
    if let Some(listener) = metrics {
        metrics::serve(agent, listener)?;
    }
    Ok(service::report(agent)?)
}

fn security(common: &Common) -> anyhow::Result<Security> {
    match &common.keys {
        Some(directory) => Ok(Security::Tls(Identity::load(directory, &common.name)?.into())),
        None => Ok(Security::Plain { insecure: common.insecure }),
    }
}

/// Starts the thread that decides, with its first state.
fn think(
    agent: &Agent,
    events: Receiver<Event>,
    silence: Duration,
    quorum: Quorum,
    first: impl FnOnce(Config, u64) -> (Node, Vec<Action>) + Send + 'static,
) -> std::io::Result<()> {
    let silence_ns = silence.as_nanos() as u64;
    let has_arbiter = agent.arbiter.is_some();
    let config = Config { silence_ns, quorum, has_arbiter, ..Config::new(agent.node) };
    let agent = agent.clone();
    let think = move || {
        brain::run(|now| first(config, now), silence_ns, &events, &agent);
    };
    std::thread::Builder::new().name("brain".into()).spawn(think).map(drop)
}

/// When a restored guest starts.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum StartArgument {
    Early,
    Smooth,
    Touched,
}

impl RestoreArguments {
    fn beginning(&self) -> Beginning {
        match (self.load_first, self.start) {
            (true, _) => Beginning::Loaded,
            (false, StartArgument::Early) => Beginning::With(Start::Early),
            (false, StartArgument::Smooth) => Beginning::With(Start::Smooth),
            (false, StartArgument::Touched) => Beginning::With(Start::Touched),
        }
    }
}

impl RunArguments {
    fn settings(&self) -> anyhow::Result<Settings> {
        let program = self.command.first().cloned().unwrap_or_default();
        Ok(Settings {
            guest: self.guest.clone().unwrap_or(program),
            epochs: self.epoch,
            service: self.service_address,
            files: self.files.clone(),
            guarantee: self.guarantee,
            arbiter: self.common.arbiter.identity(),
            path: self.path.unwrap_or(match self.common.takeover_hook {
                None => PacketPath::Spare,
                Some(_) => PacketPath::Direct,
            }),
            commit_on: self.commit_on,
            store: self.store.settings()?,
        })
    }
}

fn run_guest(arguments: RunArguments) -> anyhow::Result<u8> {
    preflight::require_kernel()?;
    raise_descriptor_limit();
    let common = &arguments.common;
    let reporter = Reporter::new(common.json);
    let (owner, inbox) = mailbox()?;
    let (brain, events) = Brain::new();
    let security = security(common)?;
    let owned = owner.clone();
    let (role, state) = (HostRole::Primary, &common.state_dir);
    let mut agent = Agent::new(security, role, common.silence, brain, owned, reporter, state)?;
    agent.memory = peer::memory(common.page_memory);
    let settings = arguments.settings()?;
    settings.require_consistent()?;
    control::require_free_name(&settings.guest)?;
    let term = begin_term(&mut agent, common, &settings)?;
    let bridge = common.service_bridge.as_deref();
    if let Some(warning) = settings.service.and_then(|service| answers_already(bridge, service)) {
        agent.reporter.note(&warning);
    }
    agent.set_key(hotspare_replica::heartbeat::fresh_key()?);
    agent.face().settings = Some(settings.clone());
    let mut doors = Doors::open(arguments.listen.as_deref(), common)?;
    let how = Launch {
        command: &arguments.command,
        directory: &arguments.directory,
        network: Network::Service(bridge),
    };
    // Before the guest runs: who sees it serve may ask for a switchover.
    control::serve(&agent, doors.control.take())?;
    let (mut maker, init) = launch(&how, &settings)?;
    maker.stop_and_copy = arguments.stop_and_copy;
    maker.term = term;
    agent.face().term = term;
    if let Some(network) = &maker.network {
        output::begin(&agent, network)?;
    }
    agent.remember((term, 0), What::Started);
    let primary = Primary::new(agent.clone(), inbox, settings.clone(), maker, init, common.hook());
    let spares = &arguments.spare;
    run_primary(&agent, (primary, &settings, term), events, common, (spares, doors))
}

fn restore_guest(arguments: RestoreArguments) -> anyhow::Result<u8> {
    let began = Instant::now();
    preflight::require_kernel()?;
    raise_descriptor_limit();
    let common = &arguments.common;
    let reporter = Reporter::new(common.json);
    let security = security(common)?;
    let nearby = peer::open_all(&arguments.pages, &security)?;
    let store = arguments.store.open(&arguments.from)?.with_nearby(nearby);
    let chosen = Chosen::new(&store, &arguments.guest, arguments.at)?;
    let service = arguments.service_address.or(chosen.service());
    let asking = service.and_then(|service| ask_for_owner(service, common));
    let found = chosen.find(arguments.beginning())?;
    let mut restoring = Restoring::prepare(found, &facts::read()?, arguments.service_address)?;
    restoring.settings.store = arguments.store.settings()?;
    restoring.settings.arbiter = common.arbiter.identity();
    if let Some(name) = &arguments.rename {
        restoring.settings.guest.clone_from(name);
    }
    let settings = restoring.settings.clone();
    control::require_free_name(&settings.guest)?;
    let (owner, inbox) = mailbox()?;
    let (brain, events) = Brain::new();
    let (role, state) = (HostRole::Primary, &common.state_dir);
    let mut agent = Agent::new(security, role, common.silence, brain, owner, reporter, state)?;
    agent.memory = peer::memory(common.page_memory);
    let term = begin_term(&mut agent, common, &settings)?;
    agent.set_key(hotspare_replica::heartbeat::fresh_key()?);
    let mut doors = Doors::open(arguments.listen.as_deref(), common)?;
    agent.reporter.note(&format!(
        "checkpoint {} of {:?}, {} of memory, {:.0} s old, is brought back",
        restoring.name().epoch,
        arguments.guest,
        size(restoring.bytes()),
        restoring.age.as_secs_f64()
    ));
    let mut spare = Spare::new(agent.clone(), inbox, common.hook());
    let bridge = common.service_bridge.as_deref();
    let (age, from) = (restoring.age, arguments.from.to_string());
    spare.ghost = Some(restoring.build(&agent, bridge)?);
    spare.stored = Some(Stale { age, from, began });
    if let Some(Ok(Some(warning))) = asking.map(JoinHandle::join) {
        agent.reporter.note(&warning);
    }
    control::serve(&agent, doors.control.take())?;
    let primary = takeover::start_cold(spare, Decision { term, at: Instant::now() })?;
    let spares = &arguments.spare;
    run_primary(&agent, (primary, &settings, term), events, common, (spares, doors))
}

/// Asks beside everything else whether somebody has the service address. Until the guest runs, who
/// answers is another.
fn ask_for_owner(service: ServiceAddress, common: &Common) -> Option<JoinHandle<Option<String>>> {
    let bridge = common.service_bridge.clone();
    let ask = move || answers_already(bridge.as_deref(), service);
    std::thread::Builder::new().name("asks".into()).spawn(ask).ok()
}

/// Where others will reach this host. Questions are answered before the guest runs, all else after.
struct Doors {
    spares: Option<TcpListener>,
    metrics: Option<TcpListener>,
    control: Option<TcpListener>,
}

impl Doors {
    /// Fails where somebody else has one of them.
    fn open(spares: Option<&str>, common: &Common) -> anyhow::Result<Self> {
        Ok(Self {
            spares: spares.map(listen).transpose()?,
            metrics: common.metrics.as_deref().map(listen).transpose()?,
            control: common.control.as_deref().map(listen).transpose()?,
        })
    }
}

/// A guest is there: decides, lets spares in, and runs until it has ended.
fn run_primary(
    agent: &Agent,
    (primary, settings, term): (Primary, &Settings, Term),
    events: Receiver<Event>,
    common: &Common,
    (spares, doors): (&[String], Doors),
) -> anyhow::Result<u8> {
    reign(agent, events, common, (settings, term))?;
    if let Some(listener) = doors.spares {
        agent.listen(listener)?;
    }
    for address in spares {
        link::keep_dialling(agent, address)?;
    }
    tell_others(agent, doors.metrics)?;
    let history = agent.history.clone();
    let ended = primary.run();
    history.flush();
    ended
}

/// Starts the brain of a host that runs a guest.
fn reign(
    agent: &Agent,
    events: Receiver<Event>,
    common: &Common,
    (settings, term): (&Settings, Term),
) -> anyhow::Result<()> {
    let fence_at_expiry = settings.writes_shared_files();
    let lease = agent.arbiter.clone().map(|arbiter| arbiter.lease);
    let first = move |config, now: u64| match lease {
        None => Node::first(config, now),
        Some(lease) => {
            let config = Config { fence_at_expiry, ..config };
            let until = now.saturating_add(lease.rest().as_nanos() as u64);
            (Node::reigning(config, now, term, until), Vec::new())
        }
    };
    Ok(think(agent, events, common.silence, settings.commit_on, first)?)
}

/// Gets the first term of a guest that is about to start.
fn begin_term(agent: &mut Agent, common: &Common, settings: &Settings) -> anyhow::Result<Term> {
    let Some(arbiter) = Arbiter::open(&common.arbiter, common.lease)? else { return Ok(Term(1)) };
    agent.arbiter = Some(arbiter.handle());
    let holds = Holds::of(settings);
    let term = arbiter.take_first(agent.node, &settings.guest, holds, &agent.reporter)?;
    arbiter.serve(agent)?;
    Ok(term)
}

fn run_spare(arguments: SpareArguments) -> anyhow::Result<u8> {
    preflight::require_kernel()?;
    raise_descriptor_limit();
    let common = &arguments.common;
    let reporter = Reporter::new(common.json);
    let (owner, inbox) = mailbox()?;
    let (brain, events) = Brain::new();
    let security = security(common)?;
    let (role, state) = (HostRole::Spare, &common.state_dir);
    let mut agent = Agent::new(security, role, common.silence, brain, owner, reporter, state)?;
    agent.memory = peer::memory(common.page_memory);
    if let Some(arbiter) = Arbiter::open(&common.arbiter, common.lease)? {
        agent.arbiter = Some(arbiter.handle());
        arbiter.serve(&agent)?;
    }
    let listener = match &arguments.listen {
        Some(address) => listen(address)?,
        None => TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0"))?,
    };
    let metrics = common.metrics.as_deref().map(listen).transpose()?;
    let control = common.control.as_deref().map(listen).transpose()?;
    let first = |config, now| (Node::spare(config, now), Vec::new());
    // Its primary says what counts.
    think(&agent, events, common.silence, Quorum::default(), first)?;
    control::serve(&agent, control)?;
    let spare = Spare::new(agent.clone(), inbox, common.hook());
    // Whoever joins it when it is primary has to find it.
    agent.listen(listener)?;
    keep_joining(&agent, arguments.join.clone())?;
    if let Some(interval) = arguments.rehearse {
        keep_rehearsing(&agent, interval, arguments.trial.plan())?;
    }
    tell_others(&agent, metrics)?;
    let ended = spare.run();
    agent.history.flush();
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_at_least_three_heartbeats() {
        assert_eq!(silence("300ms"), Ok(Duration::from_millis(300)));
        assert!(silence("80ms").is_err_and(|why| why.contains("90ms")));
    }

    #[test]
    fn metrics_are_for_this_host_unless_said_otherwise() {
        assert_eq!(metrics_address("9707").as_deref(), Ok("127.0.0.1:9707"));
        assert_eq!(metrics_address(":9707").as_deref(), Ok("127.0.0.1:9707"));
        assert_eq!(metrics_address("10.0.0.1:9707").as_deref(), Ok("10.0.0.1:9707"));
        assert!(metrics_address("nonsense").is_err());
    }

    #[test]
    fn times_have_units_and_bounds() {
        assert_eq!(duration("100ms"), Ok(Duration::from_millis(100)));
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        for wrong in ["100", "ms", "0ms", "2h"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
        assert_eq!(long_duration("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(long_duration("2h"), Ok(Duration::from_secs(7200)));
        assert_eq!(long_duration("500ms"), Ok(Duration::from_millis(500)));
        for wrong in ["m", "0m", "200h", "1d"] {
            assert!(long_duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
