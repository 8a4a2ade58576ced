//! A primary and a spare in one process: the guest on the one side, its ghost on the other.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hotspare_image::Checkpoint;
use hotspare_image::source::PageSource;
use hotspare_image::tree::GuestPid;
use hotspare_kernel::HostPid;
use hotspare_process::capture::objects::ObjectCapture;
use hotspare_process::capture::shared::SharedTable;
use hotspare_process::capture::{Captured, CheckpointRules};
use hotspare_process::ghost::{FileWorld, Ghost, GhostConfig, clock_offsets};
use hotspare_process::guest::Guest;
use hotspare_process::init::{FirstProgram, GuestNamespaces, Init, InitConfig, WritablePath};
use hotspare_process::lazy::{LoadFailure, Loaded, Loader, LoaderProgress, Plan};
use hotspare_process::objects::capture::DescriptorCapture;
use hotspare_process::objects::error::ObjectError;
use hotspare_process::objects::ipc::IpcCapture;
use hotspare_process::objects::outside::OutsideDescriptor;
use hotspare_process::objects::rules::{FileRules, Standing};
use hotspare_process::objects::socket::{self, SocketCapture};
use hotspare_process::pages::PageRun;

/// The guest where it runs, with what it prints.
pub struct Primary {
    pub init: Init,
    pub guest: Guest,
    pub output: BufReader<File>,
    // The input stays open without a byte.
    _input: File,
    objects: ObjectCapture,
}

fn pipe() -> (OwnedFd, OwnedFd) {
    nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).expect("makes a pipe")
}

impl Primary {
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_in(arguments, None)
    }

    pub fn start_in(arguments: &[&str], shared: Option<&str>) -> Self {
        let init = Init::start(config(shared)).expect("starts init");
        let outer = Outer::new();
        let program = FirstProgram {
            arguments: arguments.iter().map(|text| text.to_string()).collect(),
            environment: vec![
                "PATH=/usr/local/bin:/usr/bin:/bin".into(),
                format!("GUEST_STEPS={}", std::env::var("STEPS").unwrap_or("40".into())),
                "GUEST_STEP_MS=30".into(),
            ],
            directory: "/".into(),
            user: None,
        };
        let standard = outer.inner.each_ref().map(|file| file.as_fd());
        let newborn = init.spawn(program, standard, Some(GuestPid(2))).expect("spawns");
        let mut guest = Guest::seize(newborn.host).expect("seizes");
        newborn.go().expect("lets go");
        assert!(guest.await_program().expect("pumps"));
        Self::new(init, guest, outer, rules(shared))
    }

    fn new(init: Init, guest: Guest, outer: Outer, rules: FileRules) -> Self {
        let GuestNamespaces { net, ipc, .. } = init.namespaces().expect("opens namespaces");
        Self {
            init,
            guest,
            output: by_the_byte(outer.output.into()),
            _input: outer.input.into(),
            objects: ObjectCapture {
                descriptors: DescriptorCapture::new(rules, outside(outer.inner)),
                sockets: SocketCapture::open(net.as_fd()).expect("opens diagnostics"),
                ipc: IpcCapture::open(ipc.into()).expect("opens lists"),
            },
        }
    }

    /// The next line the guest prints.
    pub fn line(&mut self) -> String {
        next_line(&mut self.guest, &mut self.output)
    }

    pub fn run_for(&mut self, time: Duration) {
        self.guest.pump(&[], time).expect("pumps");
    }

    /// Lets the guest run until it has printed `line`.
    pub fn run_until(&mut self, line: &str) {
        while self.line() != line {}
    }

    /// A checkpoint with all that was written since the last one.
    pub fn checkpoint(&mut self) -> (Checkpoint, Vec<PageRun>) {
        let mut early = Vec::new();
        loop {
            // As an agent does, while the guest runs.
            if !self.guest.needs_preparation() {
                self.guest.scan().expect("scans");
                self.guest.precopy(1 << 20, &mut early).expect("copies");
            }
            match self.try_checkpoint() {
                Ok(Some(captured)) => {
                    early.extend(captured.runs);
                    return (captured.checkpoint, early);
                }
                Ok(None) | Err(ObjectError::Transient { .. }) => {
                    self.run_for(Duration::from_millis(2));
                }
                Err(error) => panic!("checkpoint: {error}"),
            }
        }
    }

    pub fn try_checkpoint(&mut self) -> Result<Option<Captured>, ObjectError> {
        if self.guest.needs_preparation() {
            self.guest.prepare()?;
        }
        let objects = &mut self.objects;
        let mut take = |guest: &Guest, shared: &mut SharedTable, checkpoint: &mut Checkpoint| {
            objects.take(guest, shared, checkpoint)
        };
        let mut rules = CheckpointRules { objects: &mut take, copy_all: false };
        let mut captured = self.guest.checkpoint(u64::MAX, &mut rules, &mut || Ok(()))?;
        if let Some(captured) = &mut captured {
            self.guest.refresh_flags(&mut captured.checkpoint);
        }
        Ok(captured)
    }

    /// The host dies.
    pub fn die(mut self) -> String {
        let pid = nix::unistd::Pid::from_raw(self.init.host_pid().0);
        match nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL) {
            // Whoever has lost its memory may be gone already.
            Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
            Err(error) => panic!("kill: {error}"),
        }
        while self.guest.is_alive() {
            self.guest.pump(&[], Duration::from_millis(5)).expect("pumps");
        }
        // Holds the writing end too.
        drop(self.objects);
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).expect("reads");
        rest
    }
}

fn outside(standard: [OwnedFd; 3]) -> Vec<OutsideDescriptor> {
    (0..)
        .zip(standard)
        .map(|(number, file)| OutsideDescriptor::new(number, file).expect("looks at descriptor"))
        .collect()
}

/// Lines of a guest, of which nothing is taken before it is asked for: another may read on.
fn by_the_byte(file: File) -> BufReader<File> {
    BufReader::with_capacity(1, file)
}

/// The next line the guest prints.
pub fn next_line(guest: &mut Guest, output: &mut BufReader<File>) -> String {
    while output.buffer().is_empty() {
        let file = output.get_ref().try_clone().expect("duplicates");
        if guest.pump(&[file.as_fd()], Duration::from_secs(30)).expect("pumps") == [true] {
            output.fill_buf().expect("reads");
            break;
        }
        assert!(guest.is_alive(), "the guest ended: {:?}", guest.root_status());
    }
    let mut text = String::new();
    output.read_line(&mut text).expect("reads");
    assert!(!text.is_empty(), "the guest's output ended");
    text.trim_end().to_owned()
}

fn config(shared: Option<&str>) -> InitConfig {
    let mut config = InitConfig::default();
    let path = |path: &str| WritablePath { source: path.into(), target: path.into() };
    config.surroundings.writable = shared.map(path).into_iter().collect();
    config
}

fn rules(shared: Option<&str>) -> FileRules {
    FileRules::new(shared.map(|path| (path.to_owned(), Standing::Shared)))
}

/// Memory that is still coming.
pub struct Loading {
    pub progress: Arc<LoaderProgress>,
    /// Why memory could not be had, and whether the guest lived when this was told.
    pub lost: std::sync::mpsc::Receiver<(String, bool)>,
    pub thread: JoinHandle<Result<Loaded, LoadFailure>>,
}

/// The ghost's side.
pub struct Spare {
    pub ghost: Ghost,
    rules: FileRules,
}

/// Both ends of what leads out of the guest.
struct Outer {
    input: OwnedFd,
    output: OwnedFd,
    inner: [OwnedFd; 3],
}

impl Outer {
    fn new() -> Self {
        let (stdin, input) = pipe();
        let (output, stdout) = pipe();
        let stderr = std::io::stderr().as_fd().try_clone_to_owned().expect("duplicates");
        Self { input, output, inner: [stdin, stdout, stderr] }
    }
}

impl Spare {
    pub fn start(first: &Checkpoint) -> Self {
        Self::start_in(first, None)
    }

    pub fn start_in(first: &Checkpoint, shared: Option<&str>) -> Self {
        let mut init = config(shared);
        init.surroundings.clocks = clock_offsets(first.clocks);
        let config = GhostConfig { init, replicated: Vec::new() };
        Self { ghost: Ghost::new(config).expect("makes a ghost"), rules: rules(shared) }
    }

    pub fn apply(&mut self, (checkpoint, runs): (Checkpoint, Vec<PageRun>)) {
        self.ghost.apply(checkpoint, &mut runs.into_iter()).expect("applies");
    }

    /// A full copy that arrives in pieces: layout, pages, then the checkpoint.
    pub fn fill(&mut self, (checkpoint, runs): (Checkpoint, Vec<PageRun>)) {
        self.ghost.begin_full(&checkpoint).expect("takes on the layout");
        self.ghost.fill(&mut runs.into_iter()).expect("fills");
        self.ghost.apply(checkpoint, &mut std::iter::empty()).expect("applies");
    }

    /// A restart that does not wait for its memory.
    pub fn restart_late(
        self,
        checkpoint: Checkpoint,
        source: Arc<dyn PageSource>,
        plan: &Plan,
    ) -> (Primary, Loading) {
        self.try_restart_late(checkpoint, source, plan).expect("applies")
    }

    /// The same; why it does not start.
    pub fn try_restart_late(
        mut self,
        checkpoint: Checkpoint,
        source: Arc<dyn PageSource>,
        plan: &Plan,
    ) -> Result<(Primary, Loading), String> {
        let (from, mut loading) = (source.clone(), None);
        let init = self.ghost.init().host_pid();
        let start = |loader: Loader| {
            let progress = loader.progress();
            let (told, lost) = std::sync::mpsc::channel();
            let init = format!("/proc/{init}/maps");
            let tell = move |why: &str| {
                // The maps of a process that is being ended are empty, or gone.
                let lives = std::fs::read(&init).is_ok_and(|maps| !maps.is_empty());
                let _ = told.send((why.to_owned(), lives));
            };
            let thread = std::thread::spawn(move || loader.run(&*from, &tell));
            loading = Some(Loading { progress, thread, lost });
            Ok(())
        };
        let applied = self.ghost.apply_late(checkpoint, &*source, plan, start);
        applied.map_err(|error| format!("{error}: {:?}", std::error::Error::source(&error)))?;
        let loading = loading.expect("is started");
        let mut primary = self.take_over();
        primary.guest.is_loading(loading.progress.clone());
        Ok((primary, loading))
    }

    /// Failover: the ghost goes live.
    pub fn take_over(mut self) -> Primary {
        let image = self.ghost.image().expect("has a checkpoint").clone();
        let outer = Outer::new();
        let world = FileWorld {
            rules: &self.rules,
            standard: outer.inner.each_ref().map(|file| file.as_fd()),
            age_ms: 100,
        };
        let restored = self.ghost.restore_files(&world).expect("restores files");
        let finalised = self.ghost.finalise(&restored.files, &restored.steps).expect("finalises");
        let live = || socket::go_live(&image.files, &restored.files);
        let live = self.ghost.namespaces().run(live).expect("enters the namespaces");
        live.expect("goes live");
        drop(restored);
        let released = self.ghost.release(finalised).expect("releases");
        let hosts: Vec<HostPid> = released.threads.iter().map(|thread| thread.host).collect();
        let root = released.threads.iter().find(|thread| thread.tid == GuestPid(2));
        let root = root.map_or(hosts[0], |thread| thread.host);
        let mut guest = Guest::adopt(root, &hosts).expect("adopts");
        guest.adopt_waits(&image).expect("adopts waits");
        if std::env::var_os("SHOW_PARTS").is_some() {
            println!("{} threads: {:?}", hosts.len(), released.parts);
        }
        Primary::new(released.init, guest, outer, self.rules)
    }
}
