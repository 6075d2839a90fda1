// A node for ROS 2: each image of a camera goes to a model over a lane, and what the model says is published.
//
//     ament: find_package(rclcpp), find_package(sensor_msgs), find_package(std_msgs); the header is the whole client
//     ros2 run ... --ros-args -p socket:=/run/tensord/clients.sock -p model:=brightness -p height:=48 -p width:=64
//
// The image is copied once, from the message into memory that the worker sees too. The model takes "image", UINT8[height,width,3], and
// gives "score", FP32[n].

#include <tensord_lane.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <rclcpp/rclcpp.hpp>
#include <sensor_msgs/msg/image.hpp>
#include <std_msgs/msg/float32_multi_array.hpp>
#include <stdexcept>
#include <string>

class PolicyNode : public rclcpp::Node {
public:
    PolicyNode() : rclcpp::Node("tensord_policy") {
        socket_ = declare_parameter<std::string>("socket", "/run/tensord/clients.sock");
        model_ = declare_parameter<std::string>("model", "policy");
        shape_[0] = declare_parameter<int64_t>("height", 480);
        shape_[1] = declare_parameter<int64_t>("width", 640);
        publisher_ = create_publisher<std_msgs::msg::Float32MultiArray>("score", 1);
        // The newest image only: one that waits is replaced by the next.
        subscription_ = create_subscription<sensor_msgs::msg::Image>(
            "image", 1, std::bind(&PolicyNode::seen, this, std::placeholders::_1));
        connect();
    }

    ~PolicyNode() override { tensord_close(&client_); }

    PolicyNode(const PolicyNode &) = delete;
    PolicyNode &operator=(const PolicyNode &) = delete;

private:
    // Throws std::runtime_error: there is no daemon, or no such model.
    void connect() {
        lane_ = nullptr;
        if (tensord_connect(&client_, socket_.c_str()))
            throw std::runtime_error(client_.error);
        lane_ = tensord_open(&client_, model_.c_str(), 0, 10.0);
        if (lane_ == nullptr)
            throw std::runtime_error(client_.error);
        tensord_place memory{};
        if (tensord_empty(lane_, byte_size(), &memory))
            throw std::runtime_error(lane_->error);
        image_ = tensord_part(&memory, byte_size());
        const tensord_tensor input{"image", "UINT8", 3, shape_, &image_};
        const tensord_wanted output{"score", nullptr};
        if (tensord_prepare(lane_, 0, model_.c_str(), 0, &input, 1, &output, 1))
            throw std::runtime_error(lane_->error);
    }

    uint64_t byte_size() const { return static_cast<uint64_t>(shape_[0] * shape_[1] * shape_[2]); }

    void seen(const sensor_msgs::msg::Image::SharedPtr image) {
        if (image->encoding != "rgb8" || image->height != shape_[0] || image->width != shape_[1]) {
            RCLCPP_WARN(get_logger(), "an image of another kind");
            return;
        }
        try {
            if (lane_ == nullptr)
                connect();
            ask(*image);
        } catch (const std::runtime_error &error) {
            RCLCPP_ERROR(get_logger(), "%s", error.what());
        }
    }

    void ask(const sensor_msgs::msg::Image &image) {
        const size_t row = static_cast<size_t>(shape_[1] * shape_[2]);
        for (size_t y = 0; y < static_cast<size_t>(shape_[0]); y++)
            std::memcpy(static_cast<uint8_t *>(image_.memory) + y * row, image.data.data() + y * image.step, row);
        if (tensord_call(lane_, 0, nullptr, 0, 0, answer_.get())) {
            // The worker has ended: the next image opens the model again, at a worker that is there.
            const std::string why = lane_->error;
            tensord_close(&client_);
            lane_ = nullptr;
            throw std::runtime_error(why);
        }
        if (answer_->code[0])
            throw std::runtime_error(answer_->message);
        std_msgs::msg::Float32MultiArray score;
        score.data.resize(answer_->output[0].byte_size / sizeof(float));
        std::memcpy(score.data.data(), answer_->output[0].content, score.data.size() * sizeof(float));
        tensord_release(lane_, answer_.get());
        publisher_->publish(score);
    }

    std::string socket_, model_;
    int64_t shape_[3] = {0, 0, 3};
    tensord_client client_{};
    tensord_lane *lane_ = nullptr;
    tensord_place image_{};
    std::unique_ptr<tensord_answer> answer_ = std::make_unique<tensord_answer>();
    rclcpp::Publisher<std_msgs::msg::Float32MultiArray>::SharedPtr publisher_;
    rclcpp::Subscription<sensor_msgs::msg::Image>::SharedPtr subscription_;
};

int main(int count, char **arguments) {
    rclcpp::init(count, arguments);
    try {
        rclcpp::spin(std::make_shared<PolicyNode>());
    } catch (const std::runtime_error &error) {
        RCLCPP_ERROR(rclcpp::get_logger("tensord_policy"), "%s", error.what());
        rclcpp::shutdown();
        return 1;
    }
    rclcpp::shutdown();
    return 0;
}
