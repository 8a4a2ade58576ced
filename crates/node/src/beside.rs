//! A thread that looks at the guest's kernel objects while the owner of the guest has its threads
//! answer about themselves: the guest stands still for the longer of the two, not for both.
//!
//! It has an ordinary schedule while the guest's threads answer: with more urgency it would keep
//! them waiting where processors are few. When they have, and all wait for this thread alone, it is
//! as urgent as the pause.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use hotspare_image::{Checkpoint, Epoch};
use hotspare_kernel::realtime::Hurried;
use hotspare_net::gate::Gate;
use hotspare_net::takeover::ServiceNetwork;
use hotspare_process::capture::Objects;
use hotspare_process::capture::objects::{ObjectCapture, Seen, StoppedProcesses};
use hotspare_process::capture::shared::SharedTable;
use hotspare_process::guest::Guest;
use hotspare_process::objects::error::{ObjectError, ObjectResult};

use crate::epoch::PAUSE_PRIORITY;

type Work = (ObjectCapture, StoppedProcesses);
type Done = (ObjectCapture, ObjectResult<Seen>);

/// The guest's objects, and the thread that helps to look at them.
pub struct Beside {
    /// Not here while the thread looks.
    objects: Option<ObjectCapture>,
    helper: Option<Helper>,
}

struct Helper {
    work: Sender<Work>,
    done: Receiver<Done>,
    thread: Hurried,
}

impl Helper {
    /// None where there is no second processor, or no thread to be had.
    fn start() -> Option<Self> {
        if thread::available_parallelism().map_or(1, usize::from) < 2 {
            return None;
        }
        let (work, to_do) = channel::<Work>();
        let (answer, done) = channel();
        let (tell, told) = channel();
        let help = move || {
            // Whoever started it waits for this.
            let _ = tell.send(Hurried::this());
            for (mut objects, processes) in to_do {
                processes.read_ahead();
                let seen = objects.look(processes);
                if answer.send((objects, seen)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("objects".into()).spawn(help).ok()?;
        Some(Self { work, done, thread: told.recv().ok()? })
    }
}

impl Beside {
    /// With a helper if there is a processor for it.
    pub fn new(objects: ObjectCapture) -> Self {
        Self { objects: Some(objects), helper: Helper::start() }
    }

    /// The objects; between two checkpoints they are here.
    pub fn objects(&mut self) -> &mut ObjectCapture {
        self.objects.as_mut().expect("nobody looks at the guest between two checkpoints")
    }

    fn begin(&mut self, guest: &Guest) {
        let Some(helper) = &self.helper else { return };
        let Some(objects) = self.objects.take() else { return };
        if let Err(unsent) = helper.work.send((objects, StoppedProcesses::of(guest))) {
            self.objects = Some(unsent.0.0);
        }
    }

    /// Waits for the helper, if it has been asked.
    fn collect(&mut self) -> Option<ObjectResult<Seen>> {
        if self.objects.is_some() {
            return None;
        }
        let helper = self.helper.as_ref()?;
        // It ends early only by a panic, which has been told, and the objects are lost with it.
        let answer = helper
            .done
            .try_recv()
            .or_else(|_| helper.thread.hurry(PAUSE_PRIORITY, || helper.done.recv()));
        let (objects, seen) = answer.expect("the thread \"objects\" answers");
        self.objects = Some(objects);
        Some(seen)
    }
}

/// What left the guest before its stop is to be told from what leaves later.
pub struct GateCut {
    pub gate: Arc<Gate>,
    /// The checkpoint that covers it.
    pub epoch: Epoch,
    /// Output waits from here on.
    pub close: bool,
    /// Filled in: the last packet of the spare in the path that the guest has had.
    pub inputs: u64,
}

/// The objects of one checkpoint.
pub struct Taking<'a> {
    pub beside: &'a mut Beside,
    /// The guest is to be cut off before its objects are looked at.
    pub cut_off: Option<&'a mut ServiceNetwork>,
    /// Where its packets pass.
    pub gate: Option<GateCut>,
}

impl Objects for Taking<'_> {
    fn begin(&mut self, guest: &Guest) {
        if let Some(cut) = &mut self.gate {
            cut.inputs = cut.gate.cut(cut.epoch, cut.close);
        }
        if self.cut_off.is_none() {
            self.beside.begin(guest);
        }
    }

    fn take(
        &mut self,
        guest: &Guest,
        shared: &mut SharedTable,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()> {
        if let Some(network) = &mut self.cut_off {
            let cut = network.withdraw();
            cut.map_err(|e| ObjectError::refused("the service address", e.to_string()))?;
        }
        let seen = match self.beside.collect() {
            Some(seen) => seen?,
            None => self.beside.objects().look(StoppedProcesses::of(guest))?,
        };
        self.beside.objects().enter(seen, guest, shared, checkpoint)
    }

    fn end(&mut self) {
        drop(self.beside.collect());
    }

    fn complete(&mut self, checkpoint: &mut Checkpoint) {
        self.beside.objects().complete(checkpoint);
    }
}
