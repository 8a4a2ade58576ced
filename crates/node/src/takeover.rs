//! A spare becomes the primary.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use hotspare_cluster::{Event, SuspectCause};
use hotspare_image::Checkpoint;
use hotspare_image::tree::GuestPid;
use hotspare_kernel::HostPid;
use hotspare_kernel::kill_point::{KillPoint, pass};
use hotspare_net::callers::Callers;
use hotspare_net::go_live::GoLiveWatch;
use hotspare_net::hook::HookEvent;
use hotspare_net::relay::Said;
use hotspare_net::takeover::ServiceNetwork;
use hotspare_process::ghost::FileWorld;
use hotspare_process::guest::Guest;
use hotspare_process::objects::ipc::IpcCapture;
use hotspare_process::objects::restore::Restored;
use hotspare_process::objects::socket::{self, SocketCapture};
use hotspare_replica::HostRole;

use crate::agent::Agent;
use crate::epoch::EpochMaker;
use crate::history::{Loss, What};
use crate::launch::outside;
use crate::output;
use crate::primary::Primary;
use crate::report::Failover;
use crate::settings::Guarantee;
use crate::spare::{Decision, Held, Spare, Stale};

/// How long connections are watched for peers that have moved past the checkpoint.
const WATCH: Duration = Duration::from_secs(15);
/// Some heartbeats' time.
const LAST_BEATS: Duration = Duration::from_millis(200);

/// Lets the ghost go: descriptors, address, connections, then everything runs.
///
/// The steps in order, and their undo: until the release, dropping the ghost ends it and nothing
/// has left this host but an announcement of the address.
pub fn take_over(mut spare: Spare, decision: Decision) -> anyhow::Result<Primary> {
    let began = Instant::now();
    let agent = spare.agent.clone();
    let guest = spare.ghost.as_ref().map(|held| held.settings.guest.clone()).unwrap_or_default();
    let following = spare.following.take();
    let taken = try_take_over(spare, decision, began);
    let Err(error) = &taken else {
        agent.brain.tell(Event::TakeoverDone);
        return taken;
    };
    // A primary that has switched over keeps its guest until it knows.
    if let Some(joined) = following {
        joined.decline(&format!("the takeover failed: {error:#}"));
    }
    agent.brain.tell(Event::TakeoverFailed);
    let why = format!("{error:#}");
    let epoch = agent.face().epoch;
    agent.history.note(&guest, (decision.term.0, epoch), What::TakeoverFailed { why });
    // The other spares hear it from the heart, which ends with this program.
    std::thread::sleep(LAST_BEATS);
    taken.context("take over")
}

/// Lets the ghost of a stored checkpoint go; nobody has had the guest for a while.
pub fn start_cold(spare: Spare, decision: Decision) -> anyhow::Result<Primary> {
    try_take_over(spare, decision, decision.at)
}

fn try_take_over(mut spare: Spare, decision: Decision, began: Instant) -> anyhow::Result<Primary> {
    pass(KillPoint::Decided);
    let term = decision.term;
    let detect = detected(&spare.agent, decision);
    // Checkpoints that were here before the decision came first.
    let apply = began - decision.at;
    let mut held = spare.ghost.take().context("there is no ghost")?;
    // What clients have said meanwhile, and the last that was heard of the primary.
    let said = held.relay.take().map(|standing| standing.0.end()).unwrap_or_default();
    let image = held.ghost.image().context("the ghost is empty")?.clone();
    for directory in &held.directories {
        directory.promote().context("take the replicated directory over")?;
    }
    let outage = match &spare.stored {
        Some(stale) => stale.age,
        None => detect + apply + held.settings.epoch(),
    };
    lengthen_flights(&held, true)?;
    let (restored, watch) = restore_files(&held, &image, &spare.agent, outage)?;
    pass(KillPoint::Restored);
    let finalised = held.ghost.finalise(&restored.files, &restored.steps)?;
    let finalise = began.elapsed();
    connect(&mut held, restored, &image, said, &spare.agent)?;
    let sockets = SocketCapture::open(held.ghost.namespaces().net.as_fd())?;
    let queues = IpcCapture::open(held.ghost.namespaces().ipc.as_fd().try_clone_to_owned()?)?;
    // The guest has the directories mounted by now.
    let Held { ghost, offsets, directories, network, settings, mounts, late, .. } = held;
    drop(mounts);
    let released = ghost.release(finalised)?;
    pass(KillPoint::Freed);
    let address = began.elapsed() - finalise;
    for directory in &directories {
        directory.discard_unopened();
    }
    let hosts: Vec<HostPid> = released.threads.iter().map(|thread| thread.host).collect();
    let root = released.threads.iter().find(|thread| thread.tid == GuestPid(2));
    let root = root.or(released.threads.first()).context("nothing was restored")?.host;
    let mut guest = Guest::adopt(root, &hosts)?;
    guest.adopt_waits(&image)?;
    late.into_iter().for_each(|progress| guest.is_loading(progress));
    let epoch = image.position.epoch;
    let cause = cause(&spare, decision, epoch.0, settings.guarantee);
    let failover = Failover { detect, apply, finalise, address, epoch: epoch.0, term: term.0 };
    // Before anybody hears of it: whoever asks then is to see it.
    {
        let mut face = spare.agent.face();
        face.role = HostRole::Primary;
        face.term = term;
        face.settings = Some(settings.clone());
    }
    let what = match spare.stored.take() {
        None => {
            spare.agent.reporter.failover(&failover);
            What::takeover(&failover, cause)
        }
        Some(stale) => tell_restored(&spare.agent, &failover, stale),
    };
    spare.agent.history.note(&settings.guest, (term.0, epoch.0), what);
    tracing::info!(parts = ?released.parts, "finalised");
    pass(KillPoint::Told);
    watch_connections(watch);
    spare.hook.spawn(HookEvent::Takeover, &settings, term, &spare.agent.reporter);
    let mut maker = EpochMaker::new(guest, &settings, outside()?, sockets, queues);
    (maker.offsets, maker.directories, maker.names) = (offsets, directories, image.names);
    (maker.term, maker.epoch, maker.network) = (term, epoch, network);
    let mut primary =
        Primary::new(spare.agent, spare.inbox, settings, maker, released.init, spare.hook);
    primary.since_takeover = Some(Instant::now());
    Ok(primary)
}

/// Lets the guest's connections go on at its address, before it runs.
fn connect(
    held: &mut Held,
    restored: Restored,
    image: &Checkpoint,
    said: Said,
    agent: &Agent,
) -> anyhow::Result<()> {
    if let Some(network) = held.network.as_mut() {
        network.announce().context("announce the service address")?;
        pass(KillPoint::Announced);
        // Nothing enters before the connections are there.
        network.gate().iter().for_each(|gate| gate.shut());
        output::begin(agent, network)?;
    }
    let live = || socket::go_live(&image.files, &restored.files);
    held.ghost.namespaces().run(live).context("enter the ghost")??;
    drop(restored);
    if let Some(gate) = held.network.as_ref().and_then(ServiceNetwork::gate) {
        gate.enter_late(said);
        gate.let_in();
    }
    lengthen_flights(held, false)
}

/// Tells that a stored guest runs again.
fn tell_restored(agent: &Agent, failover: &Failover, stale: Stale) -> What {
    let took = stale.began.elapsed();
    agent.reporter.restored(failover, &stale, took);
    let (age_s, took_ms) = (stale.age.as_secs_f64(), took.as_secs_f64() * 1000.0);
    What::Restored { from: stale.from, age_s, took_ms }
}

/// From the last sign of life of the primary to the decision.
fn detected(agent: &Agent, decision: Decision) -> Duration {
    agent.heard().map_or(Duration::ZERO, |heard| decision.at.saturating_duration_since(heard))
}

/// Why this host takes over, and what that costs; none if the primary wanted it.
fn cause(
    spare: &Spare,
    decision: Decision,
    epoch: u64,
    guarantee: Guarantee,
) -> Option<(&'static str, Loss)> {
    if spare.offered == Some(decision.term) {
        return None;
    }
    let (words, is_certain) = match spare.suspected {
        Some(SuspectCause::Silence) => ("the primary was silent", false),
        Some(SuspectCause::AgentDied) => ("the agent of the primary died", true),
        Some(SuspectCause::GuestDied) => ("the guest was killed on the primary", true),
        Some(SuspectCause::Fenced) => ("the primary had stopped its guest", true),
        Some(SuspectCause::Suspended) => ("the primary could not renew its term", false),
        None => ("the primary is gone", false),
    };
    // Nothing leaves a primary whose lease is over.
    let is_certain = is_certain || (guarantee.is_exact() && spare.agent.arbiter.is_some());
    let age = spare.staged.map_or(Duration::ZERO, |at| decision.at.saturating_duration_since(at));
    // With an arbiter the old one is silent, whether it knows or not.
    let is_certain = is_certain || spare.agent.arbiter.is_some();
    Some((words, Loss::new(guarantee, epoch, age, is_certain)))
}

/// What was sent and may not have arrived is sent again at once, however much it is.
fn lengthen_flights(held: &Held, lengthen: bool) -> anyhow::Result<()> {
    let exact = held.settings.guarantee.is_exact();
    let Some(network) = held.network.as_ref().filter(|_| exact) else { return Ok(()) };
    let net = held.ghost.namespaces().net.as_fd();
    network.lengthen_flights(net, lengthen).context("prepare the guest's route")
}

fn restore_files(
    held: &Held,
    image: &Checkpoint,
    agent: &Agent,
    outage: Duration,
) -> anyhow::Result<(Restored, Option<GoLiveWatch>)> {
    let (input, output, errors) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let world = FileWorld {
        rules: &held.settings.rules(),
        standard: [input.as_fd(), output.as_fd(), errors.as_fd()],
        age_ms: outage.as_millis() as u32,
    };
    let callers: Vec<_> = agent.face().callers.iter().flat_map(Callers::open).collect();
    let exact = held.settings.guarantee.is_exact();
    let watch = || GoLiveWatch::open(&image.files, &callers, outage, exact);
    let watch = held.ghost.namespaces().run(watch).context("enter the ghost")??;
    Ok((held.ghost.restore_files(&world)?, watch))
}

fn watch_connections(watch: Option<GoLiveWatch>) {
    let Some(watch) = watch else { return };
    let watching = move || match watch.run(WATCH) {
        Ok(verdicts) => tracing::info!(?verdicts, "connections after the failover"),
        Err(error) => tracing::warn!(%error, "connections could not be watched"),
    };
    let _ = std::thread::Builder::new().name("go-live".into()).spawn(watching);
}
