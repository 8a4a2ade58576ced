//! Protection that is paused on purpose: the guest runs on alone, and everybody is told so.

use std::time::Duration;

use hotspare_cluster::{Closed, Event};
use hotspare_image::NodeId;
use hotspare_replica::{Goodbye, GoodbyeCode};
use tokio::sync::oneshot;

use crate::history::What;
use crate::primary::Primary;
use crate::stored::Sink;

/// Tells whoever asked; or why it cannot be.
pub type Answer = oneshot::Sender<Result<(), String>>;

impl Primary {
    /// Pauses protection, or resumes it.
    pub fn protect(&mut self, wanted: bool, reason: &str, answer: Answer) {
        let done = match (wanted, self.is_paused) {
            (false, false) => self.pause(reason),
            (true, true) => {
                self.resume();
                Ok(())
            }
            _ => Ok(()),
        };
        // Whoever asked may have gone.
        let _ = answer.send(done);
    }

    fn pause(&mut self, reason: &str) -> Result<(), String> {
        if self.is_freezing() || self.is_frozen() {
            return Err("a switchover is under way; wait for its end".into());
        }
        self.set_paused(true);
        self.let_spares_go("its protection is paused on the host of the primary");
        self.open_gate_if_alone();
        let reason = if reason.is_empty() { "no reason was given" } else { reason };
        self.agent.reporter.alarm(&format!(
            "PROTECTION IS PAUSED by hand ({reason}): if this host dies the guest is lost; \
             `hotspare resume` ends that"
        ));
        self.remember(What::Paused { why: reason.to_owned() });
        Ok(())
    }

    fn resume(&mut self) {
        self.set_paused(false);
        self.agent.reporter.note("protection goes on: spares that wait get a full copy");
        self.remember(What::Resumed);
    }

    fn set_paused(&mut self, paused: bool) {
        self.is_paused = paused;
        self.agent.face().paused = paused;
    }

    /// No spare can take over from now on. They may join anew.
    pub fn let_spares_go(&mut self, text: &str) {
        let spares: Vec<NodeId> = self.maker.takers.spares.keys().copied().collect();
        for node in spares {
            if let Some(spare) = self.leave(node) {
                let goodbye = Goodbye { code: GoodbyeCode::Dropped, text: text.to_owned() };
                let _ = spare.goodbye(&goodbye);
            }
            self.agent.brain.tell(Event::StreamClosed { peer: node, how: Closed::ByUs });
        }
    }

    /// Whether checkpoints are wanted at all; how long to wait where they are not.
    pub fn rests(&self) -> Option<Duration> {
        if self.is_paused {
            return Some(self.settings.epoch());
        }
        if !self.is_alone() || self.maker.is_under_way() {
            return None;
        }
        // Only the store wants one.
        let wait = self.maker.takers.store.as_ref().map(Sink::wants_in);
        let wait = wait.unwrap_or(Duration::MAX).min(self.settings.epoch());
        (!wait.is_zero()).then_some(wait)
    }

    /// There is no spare.
    pub fn is_alone(&self) -> bool {
        self.maker.takers.all_spares().next().is_none()
    }
}
