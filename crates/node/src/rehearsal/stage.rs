//! Where the copy runs: a program of its own, started by the agent as `rehearsal SOCKET PIDFD`.
//!
//! A process apart from the agent, because then everything of the rehearsal ends with it, however
//! it ends: the copy (which it traces), its init, its mounts, its FUSE servers, its network. If
//! memory gets scarce, the kernel is to end this first.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hotspare_files::{ChangeSet, ReplicatedDir, Role};
use hotspare_image::Checkpoint;
use hotspare_image::memory::{MmId, SharedId};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::tun::Tun;
use hotspare_kernel::{HostPid, news, pidfd, spawn};
use hotspare_process::ghost::{FileWorld, Ghost, GhostConfig, GhostError, Released, copy};
use hotspare_process::guest::Guest;
use hotspare_process::init::{ClockOffsets, InitConfig, WritablePath};
use hotspare_process::objects::socket;
use hotspare_process::pages::{Content, PageRun};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use super::probe;
use super::report::{Ended, Report, how_ended};
use super::wire::{Frame, Orders, Said, Sources};
use crate::history::ms;
use crate::launch::raise_descriptor_limit;
use crate::settings::Settings;

/// Where the stage keeps what is its own: a file system that only it and the copy see.
const PLACE: &str = "/run/hotspare";
/// Memory runs collected before they are written.
const GATHER_BYTES: u64 = 16 << 20;
/// The building and copying steps back behind everything else by so much.
const NICE: i32 = 10;
/// How long the end of the copy may take.
const END: Duration = Duration::from_secs(10);
/// The kernel's choice if memory runs out (proc_pid_oom_score_adj(5)).
const FIRST_TO_GO: &str = "1000";

/// Does what the agent orders, and reports. An error is for the log: what is wrong with the copy
/// is in the report.
pub fn main(socket: i32, agent: i32) -> anyhow::Result<()> {
    let socket = UnixStream::from(spawn::inherited(socket)?);
    let agent = spawn::inherited(agent)?;
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    news::block_child_signals()?;
    raise_descriptor_limit();
    let _ = fs::write("/proc/self/oom_score_adj", FIRST_TO_GO);
    let mut frames = BufReader::with_capacity(1 << 20, socket.try_clone()?);
    let Frame::Orders(orders) = Frame::read(&mut frames)? else { bail!("no orders came first") };
    let mut stage = Stage { frames, socket, agent, report: Report::default() };
    let shown = stage.show(&orders);
    let (why, root) = match shown {
        Ok(root) => (None, root),
        Err(error) => (Some(format!("{error:#}")), GuestPid(0)),
    };
    let report = stage.report.judge(why, root.0);
    say(&mut stage.socket, &Said::Report(Box::new(report)))
}

fn say(socket: &mut UnixStream, said: &Said) -> anyhow::Result<()> {
    let line = serde_json::to_string(said)? + "\n";
    Ok(socket.write_all(line.as_bytes())?)
}

struct Stage {
    frames: BufReader<UnixStream>,
    socket: UnixStream,
    agent: OwnedFd,
    report: Report,
}

/// The copy while it is made.
struct Copy {
    // Dropped in this order: processes before what they have open.
    ghost: Ghost,
    files: Files,
    settings: Settings,
    /// Address spaces that had ended when they were to be read.
    missed: Vec<MmId>,
    _nowhere: Option<Tun>,
}

/// Directories of the copy's own.
struct Files {
    directories: Vec<ReplicatedDir>,
    changes: Vec<ChangeSet>,
    writable: Vec<WritablePath>,
    bytes: u64,
    scratch: Scratch,
}

/// A directory that is removed with all that is in it.
struct Scratch(Option<PathBuf>);

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            let _ = fs::remove_dir_all(path);
        }
    }
}

impl Stage {
    /// The whole journey; gives the process whose end is the guest's.
    fn show(&mut self, orders: &Orders) -> anyhow::Result<GuestPid> {
        let settings = Settings::from_pairs(&orders.settings)?;
        let began = Instant::now();
        let mut files = Files::make(&settings, orders).context("prepare the files")?;
        let first = self.copy_files(&mut files).context("copy the replicated directories")?;
        (self.report.files_ms, self.report.files_bytes) = (ms(began.elapsed()), files.bytes);
        let built = Instant::now();
        let mut copy = Copy::build(orders, settings, files, &first).context("build the copy")?;
        self.report.build_ms = ms(built.elapsed());
        let copied = Instant::now();
        self.copy_memory(&mut copy, first).context("copy the ghost's memory")?;
        self.report.copy_ms = ms(copied.elapsed());
        say(&mut self.socket, &Said::Copied)?;
        self.follow(&mut copy).context("follow the ghost")?;
        self.run(copy, orders)
    }

    /// Takes the copies of the directories; gives the checkpoint to build.
    fn copy_files(&mut self, files: &mut Files) -> anyhow::Result<Checkpoint> {
        loop {
            match Frame::read(&mut self.frames)? {
                Frame::Copy(index, chunk) => files.copy(index, &chunk)?,
                Frame::Changes(index, chunk) => files.change(index, &chunk)?,
                Frame::End(_) => files.apply()?,
                Frame::Build(state) => return Ok(Checkpoint::from_bytes(&state)?),
                other => bail!("a frame out of order: {:?}", std::mem::discriminant(&other)),
            }
        }
    }

    /// Copies what the real ghost has in memory.
    fn copy_memory(&mut self, copy: &mut Copy, first: Checkpoint) -> anyhow::Result<()> {
        let Frame::Sources(sources) = Frame::read(&mut self.frames)? else {
            bail!("nothing says where the memory is")
        };
        let mut gathered = Gathered::default();
        for space in &first.spaces {
            let holder = sources.holders.iter().find(|(id, _)| *id == space.id.0);
            let holder = holder.map(|(_, holder)| HostPid(*holder));
            let read = holder.map(|holder| {
                let mut take = |run| gathered.take(run, &mut copy.ghost);
                copy::read_space(holder, space, &mut take)
            });
            match read {
                Some(Ok(())) => {}
                // It has ended since. If the guest goes on without it, so can the copy.
                Some(Err(_)) if !is_alive(holder) => copy.missed.push(space.id),
                None => copy.missed.push(space.id),
                Some(Err(error)) => return Err(error.into()),
            }
        }
        for (id, object) in self.shared(&sources)? {
            let mut take = |run| gathered.take(run, &mut copy.ghost);
            copy::read_shared::<GhostError>(id, &object, &mut take)?;
        }
        gathered.flush(&mut copy.ghost)?;
        self.report.copied_bytes = gathered.bytes;
        copy.ghost.apply(first, &mut std::iter::empty())?;
        Ok(())
    }

    fn shared(&self, sources: &Sources) -> anyhow::Result<BTreeMap<SharedId, File>> {
        let take = |(id, fd): &(u64, i32)| {
            let object = pidfd::get_fd(self.agent.as_fd(), *fd).context("take shared memory")?;
            Ok((SharedId(*id), File::from(object)))
        };
        sources.shared.iter().map(take).collect()
    }

    /// Takes the checkpoints that have come meanwhile.
    fn follow(&mut self, copy: &mut Copy) -> anyhow::Result<()> {
        let mut runs: Vec<PageRun> = Vec::new();
        loop {
            match Frame::read(&mut self.frames)? {
                Frame::Changes(index, chunk) => copy.files.change(index, &chunk)?,
                Frame::Run(run) => runs.push(run),
                Frame::End(state) => {
                    copy.files.apply()?;
                    let checkpoint = Checkpoint::from_bytes(&state)?;
                    copy.ghost.apply(checkpoint, &mut runs.drain(..))?;
                    self.report.followed += 1;
                }
                Frame::Last => break,
                other => bail!("a frame out of order: {:?}", std::mem::discriminant(&other)),
            }
        }
        let image = copy.ghost.image().context("the copy is empty")?;
        self.report.at_epoch = image.position.epoch.0;
        self.report.processes = copy.ghost.host_pids().len();
        if image.spaces.iter().any(|space| copy.missed.contains(&space.id)) {
            bail!("a process ended while its memory was copied, and another uses it; try again");
        }
        Ok(())
    }

    /// Lets the copy run, and throws it away.
    fn run(&mut self, mut copy: Copy, orders: &Orders) -> anyhow::Result<GuestPid> {
        step_back(0);
        let began = Instant::now();
        let image = copy.ghost.image().context("the copy is empty")?.clone();
        for directory in &copy.files.directories {
            directory.promote().context("open the copied directory")?;
        }
        let nothing = File::options().read(true).write(true).open("/dev/null")?;
        let world =
            FileWorld { rules: &copy.settings.rules(), standard: [nothing.as_fd(); 3], age_ms: 0 };
        let restored = copy.ghost.restore_files(&world).context("restore open files")?;
        let finalised = copy.ghost.finalise(&restored.files, &restored.steps)?;
        self.report.finalise_ms = ms(began.elapsed());
        let live = || socket::go_live(&image.files, &restored.files);
        copy.ghost.namespaces().run(live).context("enter the copy")??;
        drop(restored);
        let Copy { ghost, files, settings, _nowhere: nowhere, .. } = copy;
        let released = ghost.release(finalised)?;
        for directory in &files.directories {
            directory.discard_unopened();
        }
        let played = self.play(&released, &image, &settings, orders);
        drop(released.init);
        drop(nowhere);
        drop(files.directories);
        drop(files.scratch);
        played
    }

    /// Watches the copy run, with the probe.
    fn play(
        &mut self,
        released: &Released,
        image: &Checkpoint,
        settings: &Settings,
        orders: &Orders,
    ) -> anyhow::Result<GuestPid> {
        let began = Instant::now();
        let first = released.threads.iter().find(|thread| thread.tid == GuestPid(2));
        let root = *first.or(released.threads.first()).context("nothing was restored")?;
        let hosts: Vec<HostPid> = released.threads.iter().map(|thread| thread.host).collect();
        let mut guest = Guest::adopt(root.host, &hosts)?;
        guest.adopt_waits(image)?;
        let plan = &orders.plan;
        let start = |command: &String| {
            let environment = environment(settings, image);
            let namespaces = released.init.namespaces()?;
            let probe = probe::start(command.clone(), environment, namespaces, plan.patience)?;
            anyhow::Ok(probe)
        };
        let probe = plan.probe.as_ref().map(start).transpose().context("start the probe")?;
        let is_over = || probe.as_ref().is_none_or(std::thread::JoinHandle::is_finished);
        while began.elapsed() < plan.run || !is_over() {
            guest.pump(&[], BEAT)?;
            if !guest.is_alive() {
                std::thread::sleep(BEAT);
            }
        }
        self.report.ran_ms = ms(began.elapsed());
        self.report.probe = probe.and_then(|probe| probe.join().ok());
        let processes: BTreeMap<GuestPid, HostPid> = released
            .threads
            .iter()
            .filter(|thread| thread.tid == thread.process)
            .map(|thread| (thread.process, thread.host))
            .collect();
        for (pid, host) in processes {
            if !guest.processes().any(|alive| alive == host) {
                let (how, badly) = how_ended(guest.status_of(host));
                self.report.ended.push(Ended { pid: pid.0, how, badly });
            }
        }
        released.init.kill();
        let deadline = Instant::now() + END;
        while guest.is_alive() && Instant::now() < deadline {
            guest.pump(&[], BEAT)?;
        }
        Ok(root.process)
    }
}

/// How often the copy is looked at.
const BEAT: Duration = Duration::from_millis(20);

fn environment(settings: &Settings, image: &Checkpoint) -> Vec<(&'static str, String)> {
    let address = settings.service.map(|service| service.address.to_string());
    let mut all = vec![
        ("HOTSPARE_GUEST", settings.guest.clone()),
        ("HOTSPARE_EPOCH", image.position.epoch.0.to_string()),
    ];
    all.extend(address.map(|address| ("HOTSPARE_ADDRESS", address)));
    all
}

/// Sets how nice this thread is to others; what the guest is has been set apart from it.
fn step_back(nice: i32) {
    let own = HostPid(std::process::id() as i32);
    // A slower or less polite copy is no reason to have none.
    let _ = spawn::set_scheduling(own, libc::SCHED_OTHER as u32, 0, nice, false);
}

fn is_alive(process: Option<HostPid>) -> bool {
    let stat = process.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/stat")).ok());
    stat.as_ref()
        .and_then(|stat| stat.rsplit_once(") "))
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Runs on their way into the copy.
#[derive(Default)]
struct Gathered {
    runs: Vec<PageRun>,
    waiting: u64,
    bytes: u64,
}

impl Gathered {
    fn take(&mut self, run: PageRun, ghost: &mut Ghost) -> Result<(), GhostError> {
        if let Content::Bytes(bytes) = &run.content {
            self.waiting += bytes.len() as u64;
            self.bytes += bytes.len() as u64;
        }
        self.runs.push(run);
        if self.waiting >= GATHER_BYTES { self.flush(ghost) } else { Ok(()) }
    }

    fn flush(&mut self, ghost: &mut Ghost) -> Result<(), GhostError> {
        self.waiting = 0;
        ghost.fill(&mut self.runs.drain(..))
    }
}

impl Copy {
    fn build(
        orders: &Orders,
        settings: Settings,
        files: Files,
        first: &Checkpoint,
    ) -> anyhow::Result<Copy> {
        let mut init = InitConfig::default();
        let (monotonic_ns, boottime_ns) = orders.clocks;
        init.surroundings.clocks = ClockOffsets { monotonic_ns, boottime_ns };
        init.surroundings.host_name = Some(orders.host_name.clone());
        init.surroundings.writable.clone_from(&files.writable);
        let config = GhostConfig { init, replicated: settings.replicated() };
        let mut ghost = Ghost::new(config)?;
        // Only this thread: the copy's processes are children of its init.
        step_back(NICE);
        let isolate =
            |service| hotspare_net::takeover::isolate(ghost.namespaces().net.as_fd(), service);
        let nowhere = settings.service.map(isolate).transpose()?;
        ghost.begin_full(first)?;
        Ok(Copy { ghost, files, settings, missed: Vec::new(), _nowhere: nowhere })
    }
}

impl Files {
    /// Makes the place of the copy's files, and serves them.
    fn make(settings: &Settings, orders: &Orders) -> anyhow::Result<Files> {
        let none = None::<&str>;
        unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace")?;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        fs::create_dir_all(PLACE)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let options = "mode=0700,size=50%";
        mount(Some("tmpfs"), PLACE, Some("tmpfs"), flags, Some(options)).context("mount tmpfs")?;
        let scratch = match &orders.plan.scratch {
            Some(directory) => Some(make_scratch(directory)?),
            None => None,
        };
        let room = scratch.clone().unwrap_or_else(|| PLACE.into());
        let mut files = Files {
            directories: Vec::new(),
            changes: Vec::new(),
            writable: Vec::new(),
            bytes: 0,
            scratch: Scratch(scratch),
        };
        for (index, rule) in settings.files.iter().enumerate() {
            let at = format!("{PLACE}/at-{index}");
            fs::create_dir(&at)?;
            if rule.replicated {
                let backing = room.join(format!("copy-{index}"));
                fs::create_dir(&backing)?;
                let served = ReplicatedDir::serve(&backing, at.as_ref(), Role::Spare)?;
                files.changes.push(served.staging());
                files.directories.push(served);
            } else {
                lay_over(&rule.path, &room, index, &at)?;
            }
            files.writable.push(WritablePath { source: at, target: rule.path.clone() });
        }
        Ok(files)
    }

    fn directory(&self, index: u8) -> anyhow::Result<&ReplicatedDir> {
        self.directories.get(usize::from(index)).context("an unknown directory")
    }

    fn copy(&mut self, index: u8, chunk: &[u8]) -> anyhow::Result<()> {
        self.bytes += chunk.len() as u64;
        let copied = self.directory(index)?.copy_chunk(chunk);
        copied.with_context(|| {
            let path = self.scratch.0.as_deref().unwrap_or(Path::new("memory"));
            format!(
                "the copy goes to {}; --scratch DIR takes it to a file system with more room",
                path.display()
            )
        })
    }

    fn change(&mut self, index: u8, chunk: &[u8]) -> anyhow::Result<()> {
        let set = self.changes.get_mut(usize::from(index)).context("an unknown directory")?;
        Ok(set.push_chunk(chunk)?)
    }

    /// The changes that have come belong to a checkpoint that is whole.
    fn apply(&mut self) -> anyhow::Result<()> {
        for (directory, set) in self.directories.iter().zip(&mut self.changes) {
            directory.apply(&std::mem::replace(set, directory.staging()))?;
        }
        Ok(())
    }
}

const SCRATCH: &str = "hotspare-rehearsal-";

/// What a stage with this number has in `directory`.
pub fn scratch_of(directory: &Path, stage: u32) -> PathBuf {
    directory.join(format!("{SCRATCH}{stage}"))
}

/// A directory of our own in `directory`; removes those of stages that are gone.
fn make_scratch(directory: &Path) -> anyhow::Result<PathBuf> {
    let failed = || format!("use {} for the copy", directory.display());
    for entry in fs::read_dir(directory).with_context(failed)?.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(SCRATCH));
        if let Some(owner) = owner.and_then(|owner| owner.parse::<u32>().ok())
            && !Path::new(&format!("/proc/{owner}")).exists()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let path = scratch_of(directory, std::process::id());
    fs::create_dir(&path).with_context(failed)?;
    Ok(path)
}

/// What the copy writes in a shared directory stays above it, and goes with the copy.
fn lay_over(lower: &str, room: &Path, index: usize, at: &str) -> anyhow::Result<()> {
    if lower.contains([',', ':', '\\']) {
        bail!("the shared directory {lower} has a name that overlayfs does not take");
    }
    let (upper, work) = (room.join(format!("upper-{index}")), room.join(format!("work-{index}")));
    fs::create_dir(&upper)?;
    fs::create_dir(&work)?;
    let options =
        format!("lowerdir={lower},upperdir={},workdir={}", upper.display(), work.display());
    let laid = mount(Some("overlay"), at, Some("overlay"), MsFlags::empty(), Some(&*options));
    laid.with_context(|| format!("lay something writable over the shared directory {lower}"))
}
