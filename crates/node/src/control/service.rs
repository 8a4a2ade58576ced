//! The agent's end.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll};
use std::time::Duration;

use hotspare_store::PackMemory;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::proto::control_server::Control;
use super::proto::{
    Event, EventsRequest, HistoryRequest, HistoryResponse, PackPart, PagesRequest, PagesResponse,
    PauseProtectionRequest, PauseProtectionResponse, Record, RehearseRequest, RehearseResponse,
    ResumeProtectionRequest, ResumeProtectionResponse, StatusRequest, StatusResponse,
    SwitchoverRequest, SwitchoverResponse, event,
};
use crate::agent::{Agent, Message};
use crate::rehearsal::{self, Plan};
use crate::report::News;
use crate::switchover::Asker;

/// Events that wait for a caller, besides those that all have in common.
const WAITING: usize = 16;

/// Bytes of pages that are given at once, and in one part.
const PAGES_BYTES_MAX: u64 = 64 << 20;
const PART_BYTES_MAX: u64 = 2 << 20;

/// Answers for an agent.
#[derive(Clone)]
pub struct Service {
    agent: Agent,
}

impl Service {
    /// For this agent.
    pub fn new(agent: Agent) -> Self {
        Self { agent }
    }

    async fn protect(&self, wanted: bool, reason: String) -> Result<(), Status> {
        let (answer, outcome) = oneshot::channel();
        self.agent.owner.send(Message::Protect { wanted, reason, answer });
        match outcome.await {
            Ok(done) => done.map_err(Status::failed_precondition),
            Err(_) => Err(ending()),
        }
    }
}

fn ending() -> Status {
    Status::unavailable("the agent is ending")
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Control for Service {
    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusResponse> {
        Ok(Response::new(self.agent.status()))
    }

    type EventsStream = ReceiverStream<Result<Event, Status>>;

    async fn events(&self, request: Request<EventsRequest>) -> Answer<Self::EventsStream> {
        let epochs = request.into_inner().epochs;
        let mut happenings = self.agent.reporter.listen();
        let (to, stream) = mpsc::channel(WAITING);
        tokio::spawn(async move {
            loop {
                let event = match happenings.recv().await {
                    Ok(happening) if !epochs && matches!(happening.news, News::Epoch(_)) => {
                        continue;
                    }
                    Ok(happening) => Event::from(happening),
                    Err(RecvError::Lagged(missed)) => {
                        Event { wall_ms: 0, what: Some(event::What::Missed(missed)) }
                    }
                    Err(RecvError::Closed) => return,
                };
                if to.send(Ok(event)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type SwitchoverStream = LastWord;

    async fn switchover(&self, request: Request<SwitchoverRequest>) -> Answer<LastWord> {
        let to = request.into_inner().to.map(|to| to.parse()).transpose();
        let to = to.map_err(|_| Status::invalid_argument("`to` is no address of a host"))?;
        let (asker, asked) = Asker::new();
        self.agent.owner.send(Message::Switchover(asker, to));
        match asked.outcome.await {
            Ok(Ok(moved)) => {
                let stall_ms = moved.stall.as_secs_f64() * 1000.0;
                let word = SwitchoverResponse { stall_ms, epoch: moved.epoch };
                Ok(Response::new(LastWord { word: Some(word), held: Some(asked.passed_on) }))
            }
            Ok(Err(why)) => Err(Status::failed_precondition(why)),
            Err(_) => Err(ending()),
        }
    }

    async fn rehearse(&self, request: Request<RehearseRequest>) -> Answer<RehearseResponse> {
        let asked = request.into_inner();
        let time = |ms: Option<u64>, usual: Duration| ms.map_or(usual, Duration::from_millis);
        let plan = Plan {
            probe: asked.probe,
            run: time(asked.run_ms, rehearsal::RUN),
            patience: time(asked.patience_ms, rehearsal::PATIENCE),
            scratch: asked.scratch.map(PathBuf::from),
        };
        if plan.run > rehearsal::LONGEST || plan.patience > rehearsal::LONGEST {
            return Err(Status::invalid_argument("a rehearsal takes an hour at most"));
        }
        let (answer, outcome) = oneshot::channel();
        self.agent.owner.send(Message::Rehearse(plan, answer));
        let report = match outcome.await {
            Ok(outcome) => outcome.map_err(Status::failed_precondition)?,
            Err(_) => return Err(ending()),
        };
        let json = serde_json::to_string(&report).unwrap_or_default();
        let (passed, text) = (report.passed, report.text());
        Ok(Response::new(RehearseResponse { passed, text, json }))
    }

    async fn pause_protection(
        &self,
        request: Request<PauseProtectionRequest>,
    ) -> Answer<PauseProtectionResponse> {
        self.protect(false, request.into_inner().reason).await?;
        Ok(Response::new(PauseProtectionResponse {}))
    }

    async fn resume_protection(
        &self,
        _: Request<ResumeProtectionRequest>,
    ) -> Answer<ResumeProtectionResponse> {
        self.protect(true, String::new()).await?;
        Ok(Response::new(ResumeProtectionResponse {}))
    }

    type PagesStream = tokio_stream::Iter<std::vec::IntoIter<Result<PagesResponse, Status>>>;

    async fn pages(&self, request: Request<PagesRequest>) -> Answer<Self::PagesStream> {
        let parts = parts(self.agent.memory.as_deref(), &request.into_inner().parts)?;
        let parts: Vec<_> = parts.into_iter().map(Ok).collect();
        Ok(Response::new(tokio_stream::iter(parts)))
    }

    async fn history(&self, request: Request<HistoryRequest>) -> Answer<HistoryResponse> {
        let newest = request.into_inner().newest as usize;
        let guest = self.agent.face().settings.as_ref().map(|settings| settings.guest.clone());
        let history = self.agent.history.clone();
        let read = tokio::task::spawn_blocking(move || history.read(guest.as_deref())).await;
        let read = read.map_err(|error| Status::internal(error.to_string()))?;
        let (records, torn) = read.map_err(|error| Status::internal(format!("{error:#}")))?;
        let first = if newest == 0 { 0 } else { records.len().saturating_sub(newest) };
        let records = records[first..].iter().map(Record::from).collect();
        let torn = u32::try_from(torn).unwrap_or(u32::MAX);
        Ok(Response::new(HistoryResponse { records, torn }))
    }
}

/// The parts that a restore elsewhere asks for.
fn parts(memory: Option<&PackMemory>, wanted: &[PackPart]) -> Result<Vec<PagesResponse>, Status> {
    let bytes = wanted.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
    if bytes > PAGES_BYTES_MAX || wanted.iter().any(|part| part.bytes > PART_BYTES_MAX) {
        return Err(Status::invalid_argument("that is more than is given at once"));
    }
    let part = |wanted: &PackPart| {
        let range = wanted.offset..wanted.offset.saturating_add(wanted.bytes);
        let content = memory.and_then(|memory| memory.part(&wanted.pack, range));
        let content = content.ok_or_else(|| Status::not_found(wanted.pack.clone()))?;
        Ok(PagesResponse { content })
    };
    wanted.iter().map(part).collect()
}

/// A stream of one word, after which the program may end: whoever waits for that is let go once
/// the word has been handed to the kernel.
pub struct LastWord {
    word: Option<SwitchoverResponse>,
    held: Option<Sender<()>>,
}

impl Stream for LastWord {
    type Item = Result<SwitchoverResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.word.take().map(Ok))
    }
}

impl Drop for LastWord {
    fn drop(&mut self) {
        let held = self.held.take();
        // All tasks are of this thread and take turns: that of the connection, which has been
        // given the word, writes before this one has had several.
        tokio::spawn(async move {
            for _ in 0..TURNS {
                tokio::task::yield_now().await;
            }
            drop(held);
        });
    }
}

/// More than the connection needs.
const TURNS: u32 = 64;
